"""Composite configurations: taken apart into modules that have every weight of transformers' own model."""

import json
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from typer.testing import CliRunner

from workbench.cli.app import app
from workbench.job.draft import Train, draft, machines_of
from workbench.job.job import load_job
from workbench.model.composites.composite import LLM, Part, Parts
from workbench.model.composites.registry import COMPOSITES, take_apart
from workbench.model.hf_config import modality_of, module_from_config
from workbench.model.model_graph import Module

WIDTH = 48
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "head_dim": 12,
    "pad_token_id": 0,
}
VIT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
HEARD = {"num_mel_bins": 8, "max_source_positions": 10}
OMNI_HEARD = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 8,
    "n_window": 10,
    "output_dim": WIDTH,
}
CASES: dict[str, dict[str, Any]] = {
    "llava": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VIT},
    "llava, mistral, no bias": {
        "model_type": "llava",
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
        "vision_feature_layer": -3,
        "multimodal_projector_bias": False,
        "tie_word_embeddings": True,
    },
    "llava_next": {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": VIT},
    "llava_onevision": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VIT},
    "qwen2_vl": {
        "text_config": TEXT,
        "vision_config": {**QWEN, "embed_dim": 24, "hidden_size": WIDTH, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": TEXT,
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": WIDTH},
    },
    "internvl": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VIT},
    "internvl, earlier state": {
        "model_type": "internvl",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "vision_feature_layer": -2,
        "tie_word_embeddings": False,
    },
    "gemma3": {"text_config": TEXT, "vision_config": VIT, "mm_tokens_per_image": 4},
    "paligemma": {
        "text_config": {"model_type": "gemma2", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VIT},
        "projection_dim": WIDTH,
    },
    "mllama": {
        "text_config": {**TEXT, "cross_attention_layers": [1]},
        "vision_config": {
            **{key: value for key, value in VIT.items() if key != "num_attention_heads"},
            "num_global_layers": 1,
            "attention_heads": 2,
            "intermediate_layers_indices": [1, 3],
            "vision_output_dim": 72,
        },
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "scale_factor": 4,
        "pad_token_id": 0,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **VIT, "head_dim": 12},
        "spatial_merge_size": 2,
    },
    "qwen2_audio": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 24,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            **HEARD,
        },
    },
    "qwen3_vl": {
        "text_config": TEXT,
        "vision_config": {
            **QWEN,
            "depth": 3,
            "hidden_size": 24,
            "intermediate_size": 40,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen2_5_omni_thinker": {
        "text_config": {**TEXT, "tie_word_embeddings": False},
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": WIDTH},
        "audio_config": {**OMNI_HEARD},
    },
    "llama4": {
        "text_config": {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "vision_config": {
            **VIT,
            "intermediate_size": 96,
            "vision_output_dim": 56,
            "projector_input_dim": 56,
            "projector_output_dim": 56,
        },
    },
    "phi4_multimodal": {
        **TEXT,
        "vision_config": VIT,
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "input_size": 16,
            "time_reduction": 4,
            "nemo_conv_channels": 8,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "bias_max_distance": 16,
        },
    },
    "voxtral": {
        "audio_token_id": 5,
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {
            "model_type": "voxtral_encoder",
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            **HEARD,
            "max_source_positions": 12,
        },
    },
}
CASES["qwen2_5_omni"] = {"thinker_config": CASES["qwen2_5_omni_thinker"]}
CONFIGS = {name: {"model_type": name, **case} for name, case in CASES.items()}


def built(config: dict[str, Any]) -> nn.Module:
    """transformers' own model."""
    names = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    names = {**names, **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if config["model_type"] == "qwen2_5_omni":  # its thinker is what is trained
        return built({"model_type": "qwen2_5_omni_thinker", **config["thinker_config"]})
    rest = {key: value for key, value in config.items() if key != "model_type"}
    model: nn.Module = getattr(transformers, names[config["model_type"]])(
        AutoConfig.for_model(config["model_type"], **rest)
    )
    return model


def original(config: dict[str, Any]) -> nn.Module:
    """transformers' own model, without memory."""
    with torch.device("meta"):
        return built(config)


def modules_of(parts: dict[str, Part]) -> dict[str, Module]:
    llm = module_from_config(parts[LLM].config, name=LLM, modality="text")
    made = {LLM: llm}
    for name, part in parts.items():
        if name != LLM:
            made[name] = module_from_config(
                part.config,
                name=name,
                modality=name,
                projector=part.projector,
                feature_layer=part.feature_layer,
                llm_width=llm.layers[0].out_width,
            )
    return made


def owner_of(parts: Parts, weight: str) -> str:
    """The module whose weights begin like that: the longest beginning, or the only encoder's own names."""
    starts = [(start, name) for name, part in parts.modules.items() for start in part.weights.values()]
    return max((len(start), name) for start, name in starts if weight.startswith(start))[1]


def test_every_composite_is_held_against_transformers() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(COMPOSITES)


@pytest.mark.parametrize("name", CONFIGS)
def test_modules_have_every_weight_of_the_whole(name: str) -> None:
    """Module by module, with those that are named as left out."""
    config = CONFIGS[name]
    parts = take_apart(config)
    modules = modules_of(dict(parts.modules))
    dropped = tuple(each.weights for each in parts.dropped)
    sizes = dict.fromkeys(modules, 0)
    for weight, held in original(config).named_parameters():
        if not weight.startswith(dropped):
            sizes[owner_of(parts, weight)] += held.numel()
    assert sizes == {called: module.num_parameters for called, module in modules.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_name_that_is_dropped_is_one(name: str) -> None:
    """A pooling head may be absent; everything else that is named is there."""
    config = CONFIGS[name]
    weights = [weight for weight, _ in original(config).named_parameters()]
    for dropped in take_apart(config).dropped:
        optional = "pooling head" in dropped.what or dropped.weights.startswith(("talker.", "token2wav."))
        assert optional or any(weight.startswith(dropped.weights) for weight in weights), dropped


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_configuration_says_the_same(name: str, tmp_path: Any) -> None:
    """transformers leaves out of a config.json what its classes have as defaults."""
    config = CONFIGS[name]
    rest = {key: value for key, value in config.items() if key != "model_type"}
    AutoConfig.for_model(config["model_type"], **rest).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    ours, read = take_apart(config), take_apart(saved)
    assert read.token_ids
    counts = [{n: m.num_parameters for n, m in modules_of(dict(p.modules)).items()} for p in (ours, read)]
    assert counts[0] == counts[1]
    assert ours.dropped == read.dropped


@pytest.mark.parametrize("name", CONFIGS)
def test_init_writes_a_job_that_is_read(name: str, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    target = tmp_path / "job.yaml"
    arguments = ["init", str(tmp_path), "--gpus", "4xA100-80GB", "-o", str(target), "--json"]
    done = CliRunner().invoke(app, [*arguments, "--text-tokens", "32", "--image", "32x32"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    job = load_job(target)
    assert {m.name: m.num_parameters for m in job.model.modules} == {
        called: said["weights"] for called, said in record["modules"].items()
    }
    assert len(job.batch) >= job.replicas


def test_flat_configurations_of_qwen_are_read_as_nested_ones() -> None:
    nested = CONFIGS["qwen2_vl"]
    flat = {"model_type": "qwen2_vl", **TEXT, "vision_config": nested["vision_config"]}
    counts = [
        {name: module.num_parameters for name, module in modules_of(dict(take_apart(c).modules)).items()}
        for c in (nested, flat)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer must be a whole number"),
        ({"vision_config": 3}, "vision_config must be an object"),
        ({"vision_feature_layer": -9}, "feature_layer must be from -5 to 4, got -9"),
        ({"text_config": {"model_type": "lama"}}, "nearest: llama"),
    ],
)
def test_what_cannot_be_said_is_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        modules_of(dict(take_apart({**CONFIGS["llava"], **change}).modules))


def test_a_composite_is_no_module() -> None:
    for config in (CONFIGS["mllama"], CONFIGS["qwen2_vl"], CONFIGS["qwen2_audio"]):
        with pytest.raises(ValueError, match="workbench init"):
            modality_of(config)


def test_an_unknown_composite_names_the_nearest(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava_nxt", "vision_config": {}}))
    with pytest.raises(ValueError, match=r"'llava_nxt' is not taken apart \(nearest: llava_next\)"):
        draft(str(tmp_path), machines_of("8xH100", None), train=Train.LLM, text_tokens=8, image_px=None)


@pytest.mark.parametrize(
    ("gpus", "nodes", "words"),
    [
        ("H100", None, "want a number, 'x' and a device"),
        ("0xH100", None, "want a number, 'x' and a device"),
        ("8xH1000", None, "nearest: H100"),
        ("16xH100", 3, "must divide 16 GPUs, got 3; nearest: 2"),
    ],
)
def test_machines_that_cannot_be_are_refused(gpus: str, nodes: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        machines_of(gpus, nodes)


def test_trainable_is_what_was_asked_for(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llava"]))
    machines = machines_of("8xH100", None)
    trained = {}
    for train in Train:
        made = draft(str(tmp_path), machines, train=train, text_tokens=8, image_px=None)
        trained[train] = {
            module.name: sum(layer.trainable for layer in module.layers) for module in made.model.modules
        }
    assert trained[Train.PROJECTORS] == {"vision": 1, "llm": 0}
    assert trained[Train.LLM] == {"vision": 1, "llm": 5}
    assert trained[Train.ALL] == {"vision": 5, "llm": 5}
