"""Configurations of every family and composite, weights and their index, and projectors."""

import json
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from experiments.doors.whole_configs import CONFIGS
from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.writing import CORPUS, JSON, Form, folder_in, json_bytes, reading
from runtime.models.choose import adapter_of
from runtime.models.weights import weights_of
from workbench.cli.starting import init_command
from workbench.job.job import load_job
from workbench.model.checkpoint import check_weights
from workbench.model.composites.registry import COMPOSITES
from workbench.model.families.family import Architecture
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.hf_config import modality_of, module_from_config, read_config
from workbench.model.model_graph import TEXT
from workbench.model.processor_config import read_processor
from workbench.model.projector import from_text, to_text

GPUS = "8xH100"
LLM_WIDTH = 32
HEADER_LENGTH = struct.Struct("<Q")


def _family(family: Architecture, folder: Path) -> Ready:
    def use(config: Mapping[str, Any]) -> None:
        modality = modality_of(config)
        module_from_config(
            config, name="m", modality=modality, llm_width=None if modality == TEXT else LLM_WIDTH
        )

    seeds = [{"model_type": family.model_type, **example.config} for example in family.examples.values()]
    return reading(JSON, folder / "config.json", seeds, read_config, use)


def _composite(name: str, folder: Path) -> Ready:
    out, path = folder_in(folder), folder / "config.json"

    def use(config: object) -> None:
        del config
        init_command(str(path), GPUS, out / "job.yaml", as_json=True)

    seeds = [config for config in CONFIGS.values() if config["model_type"] == name]
    return reading(JSON, path, seeds, read_config, use, out=out)


PROCESSORS = {
    "idefics3": ({"size": {"longest_edge": 1456}},),
    "internvl": ({"min_patches": 1, "max_patches": 6}, {"image_processor": {"max_patches": 4}}),
    "llava_onevision": ({"image_grid_pinpoints": [[384, 384], [384, 768], [768, 768]]},),
    "phi4_multimodal": ({"dynamic_hd": 36},),
    "qwen2_5_omni": ({"chunk_length": 90, "min_pixels": 3136},),
    "qwen2_5_vl": (
        {"min_pixels": 3136, "max_pixels": 12_845_056},
        {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
        {
            "min_pixels": 3136,
            "video_processor": {"fps": 2, "max_frames": 64, "size": {"longest_edge": 2**20}},
        },
    ),
}
"""What processors of composites say, by model_type."""


def _processor(name: str, folder: Path) -> Ready:
    out, path = folder_in(folder), folder / "preprocessor_config.json"
    config = next(config for config in CONFIGS.values() if config["model_type"] == name)
    (folder / "config.json").write_bytes(json_bytes(config))
    sizes = folder / "sizes.jsonl"
    row: dict[str, float] = {"text_tokens": 99, "image_width": 640, "image_height": 480}
    if "audio_config" in json.dumps(config):
        row["audio_seconds"] = 20
    if name.startswith("qwen2_5_vl"):
        row |= {"video_width": 1280, "video_height": 720, "video_seconds": 8.5}
    sizes.write_text(f"{json.dumps(row)}\n" * 4)

    def use(parsed: object) -> None:
        del parsed
        init_command(str(folder), GPUS, out / "job.yaml", data=sizes, as_json=True)

    return reading(JSON, path, PROCESSORS[name], read_processor, use, out=out)


def safetensors_bytes(tree: Any) -> bytes:
    """Any header with its length, before the bytes of the tensors."""
    if not isinstance(tree, dict) or set(tree) != {"header", "num_bytes"}:
        return json_bytes(tree)
    header = json_bytes(tree["header"])
    num_bytes = tree["num_bytes"]
    num_bytes = num_bytes if isinstance(num_bytes, int) and 0 <= num_bytes < 2**20 else 0
    return HEADER_LENGTH.pack(len(header)) + header + bytes(num_bytes)


def safetensors_tree(content: bytes) -> Any:
    """The tree of a file of `safetensors_bytes`."""
    length = HEADER_LENGTH.unpack_from(content)[0]
    header = content[HEADER_LENGTH.size : HEADER_LENGTH.size + length]
    return {"header": json.loads(header), "num_bytes": len(content) - HEADER_LENGTH.size - length}


SAFETENSORS = Form(safetensors_bytes, safetensors_tree)


def _llm() -> Any:
    job = load_job(CORPUS / "job.yaml")
    return adapter_of(next(module for module in job.model.modules if module.name == "llm"))


def _read_all(folder: Path, adapter: Any) -> None:
    """Read every tensor of the language model."""
    reader = weights_of(folder, adapter)
    for name, shape in adapter.shapes().items():
        reader.read(name, tuple(shape))


def _good_weights(adapter: Any) -> list[Any]:
    """Valid weights, with experts one by one or transposed, where checkpoints may have them so."""
    tensors: dict[str, torch.Tensor] = {}
    separate = adapter.separate_experts
    for name, shape in adapter.shapes().items():
        pieces = () if separate is None else separate.pieces(name, shape[0])
        for parts in pieces:
            tensors |= {part: torch.zeros(shape[1] // len(parts), shape[2]) for part in parts}
        if not pieces:
            is_turned = adapter.transposes_experts and ".experts." in name
            tensors[name] = torch.zeros((*shape[:-2], *shape[:-3:-1]) if is_turned else shape)
    return [safetensors_tree(save(tensors))]


def _experts(folder: Path, model_type: str = "qwen3_moe") -> Ready:
    (example,) = ARCHITECTURES[model_type].examples.values()
    small = {"hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1, "moe_intermediate_size": 12}
    config = {"model_type": model_type, **example.config, **small}
    return _reading_weights(adapter_of(module_from_config(config, name="llm", modality=TEXT)), folder)


def _weights(folder: Path) -> Ready:
    return _reading_weights(_llm(), folder)


def _reading_weights(adapter: Any, folder: Path) -> Ready:
    weights_folder = folder_in(folder, "llm")
    return reading(
        SAFETENSORS,
        weights_folder / "model.safetensors",
        _good_weights(adapter),
        lambda path: _read_all(folder, adapter),
        called=weights_folder.name,
    )


def _length(folder: Path) -> Ready:
    path = folder_in(folder, "llm") / "model.safetensors"
    return reading(SAFETENSORS, path, _good_weights(_llm()), lambda path: check_weights(folder, ["llm"]))


def _index(folder: Path) -> Ready:
    adapter, weights_folder = _llm(), folder_in(folder, "llm")
    shapes = adapter.shapes()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    placed: dict[str, str] = {}
    for number, shard in enumerate(names):
        part = {name: torch.zeros(shapes[name]) for name in sorted(shapes)[number::2]}
        (weights_folder / shard).write_bytes(save(part))
        placed |= dict.fromkeys(part, shard)

    return reading(
        JSON,
        weights_folder / "model.safetensors.index.json",
        [{"metadata": {"total_size": 1}, "weight_map": placed}],
        lambda path: _read_all(folder, adapter),
        called=weights_folder.name,
    )


def _projector(folder: Path) -> Ready:
    del folder
    return Ready(
        seeds=PROJECTORS,
        render=json_bytes,
        parse=json.loads,
        take=lambda content: to_text(from_text(content.decode())),
    )


PROJECTORS = (
    [{"merge": 4}, {"linear": 64}, {"act": "gelu"}, {"linear_out": True}],
    [{"merge": 2, "how": "mean"}, {"norm": "rms"}, {"linear_out": True, "bias": False}],
)

TARGETS = (
    *(
        Target(
            name=f"config-{name}",
            make=partial(_family, family),
            readers=("workbench.model.hf_config:read_config",),
        )
        for name, family in ARCHITECTURES.items()
    ),
    *(
        Target(
            name=f"composite-{name}",
            make=partial(_composite, name),
            readers=("workbench.model.hf_config:read_config",),
        )
        for name in COMPOSITES
    ),
    *(
        Target(
            name=f"processor-{name}",
            make=partial(_processor, name),
            readers=("workbench.model.processor_config:_object",),
        )
        for name in PROCESSORS
    ),
    Target(
        name="weights",
        make=_weights,
        readers=("runtime.models.weights:files_of", "runtime.models.weights:_checked"),
    ),
    Target(name="weights-experts", make=_experts, readers=("runtime.models.weights:_checked",)),
    Target(
        name="weights-turned",
        make=partial(_experts, model_type="qwen3_vl_moe_text"),
        readers=("runtime.models.stored_tensors:_turned",),
    ),
    Target(name="weights-length", make=_length, readers=("workbench.model.checkpoint:_check_length",)),
    Target(name="weights-index", make=_index, readers=("runtime.models.weights:files_of",)),
    Target(name="projector", make=_projector, readers=("workbench.model.projector:from_text",)),
)
