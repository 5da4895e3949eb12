"""A tiny Llama 3.2 Vision: configurations, samples, and weights whose gates let images through."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.reference import whole_stage
from runtime.step.stage_module import build_stage_module
from tests import tiny_models
from workbench.data.sample import Sample, Segment
from workbench.model.checkpoint import SINGLE
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect

WIDTH = tiny_models.WIDTH
VISION: dict[str, Any] = {
    "model_type": "mllama_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "max_num_tiles": 4,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 48,
}
LANGUAGE: dict[str, Any] = tiny_models.LLAMA | {
    "model_type": "mllama_text_model",
    "num_hidden_layers": 6,
    "cross_attention_layers": [1, 3, 4],
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CROSS = (2, 4, 5)  # layers of the LLM that look at images, counted from the embedding
TILES, PATCHES, PADDED = 4, 5, 8
TOKENS = TILES * PADDED


def vision() -> Module:
    return module_from_config(VISION, name="vision", modality="vision", llm_width=WIDTH)


def language() -> Module:
    return module_from_config(LANGUAGE, name="llm", modality=TEXT)


def model(images: Module | None = None, text: Module | None = None) -> ModelGraph:
    return connect("mllama", (images or vision(), text or language()))


def image(k: int, grid: tuple[int, int] | None = None) -> Segment:
    return Segment("vision", k, TOKENS, 1, grid)


def words(k: int, tokens: int) -> Segment:
    return Segment(TEXT, k, tokens, tokens)


def batch() -> tuple[Sample, ...]:
    """An image first, in the midst with room for tiles that it does not fill, none, two in a row and one."""
    return (
        Sample(0, (image(0, (2, 2)), words(0, 6))),
        Sample(1, (words(0, 3), image(0, (1, 2)), words(1, 4))),
        Sample(2, (words(0, 5),)),
        Sample(3, (image(0), image(1, (3, 1)), words(0, 3), image(2, (1, 1)), words(1, 2))),
    )


def save_weights(folder: Path, modules: Sequence[Module], *, seed: int = 3) -> Path:
    """Fresh weights with gates that are open: the folder of a run's `weights`."""
    for module in modules:
        plan = tiny_models.plan_of(ModelGraph(name="alone", modules=(module,)), ())
        built = build_stage_module(plan, whole_stage(module), seed=seed, dtype=torch.float64)
        held = {name: weight.detach().clone() for name, weight in built.named_weights()}
        for index, name in enumerate(sorted(held)):
            if "gate" in name.rpartition(".")[2]:
                held[name].fill_(0.3 + 0.05 * (index % 7))
        (folder / module.name).mkdir(parents=True)
        save_file(held, folder / module.name / SINGLE, metadata={"format": "pt"})
    return folder
