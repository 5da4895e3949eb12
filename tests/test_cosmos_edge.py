"""Cosmos 3 Edge: sizes of images as its processor makes them, axes behind its tower, released names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file, save_file
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v

from experiments.doors.families import plan_of
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, saved
from runtime.data.batches import axes_of
from runtime.step.stage_module import build_stage_module
from tests.test_tilings import SIDES
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import LLM, VISION, name_in_composite
from workbench.model.composites.registry import take_apart
from workbench.model.item_tokens import image_tokens
from workbench.model.model_graph import TEXT

NAME = "cosmos3_edge"
TOWER = "model.visual."
RELEASED = {
    "model.language_model.": "",
    **{f".self_attn.{letter}_proj.": f".self_attn.to_{letter}." for letter in "qkv"},
    ".self_attn.o_proj.": ".self_attn.to_out.",
    ".mlp.fc1.": ".mlp.up_proj.",
    ".mlp.fc2.": ".mlp.down_proj.",
}


def modules(**more: Any) -> dict[str, Any]:
    config = CONFIGS[NAME]
    return modules_of(
        dict(take_apart({**config, "vision_config": {**config["vision_config"], **more}}).modules)
    )


@given(height=SIDES, width=SIDES)
def test_images_are_sized_as_by_its_processor(height: int, width: int) -> None:
    """Or refused where it does."""
    tower = modules(patch_size=16, image_size=None)[VISION]
    limits = {"min_pixels": 256**2, "max_pixels": 4096**2}
    try:
        high, wide = glm4v.smart_resize(1, height, width, temporal_factor=1, factor=32, **limits)
    except ValueError:
        with pytest.raises(ValueError, match="image"):
            image_tokens(tower, height, width)
        return
    assert image_tokens(tower, height, width) == (high // 16 * (wide // 16), high // 32 * (wide // 32))


def test_a_processors_limits_are_read(tmp_path: Path) -> None:
    tower = modules(patch_size=16, image_size=None, min_pixels=64**2, max_pixels=128**2)[VISION]
    assert image_tokens(tower, 1000, 1000) == (64, 16)
    assert image_tokens(tower, 32, 32) == (16, 4)


def test_an_images_tokens_have_rows_and_columns() -> None:
    """What follows begins beyond the longer side."""
    image = Segment(VISION, 0, 24, 6, grid=(4, 6))
    sample = Sample(0, (Segment(TEXT, 0, 2, 2), image, Segment(TEXT, 1, 1, 1)))
    time, row, column = axes_of(modules().values(), (sample,)).tolist()
    assert time == [0, 1, *[2] * 6, 5]
    assert row == [0, 1, 2, 2, 2, 3, 3, 3, 5]
    assert column == [0, 1, 2, 3, 4, 2, 3, 4, 5]


def test_released_files_are_read(tmp_path: Path) -> None:
    """They rename the language model alone."""
    model = saved(NAME, tmp_path)
    theirs = dict(model.named_parameters())
    (file,) = tmp_path.glob("*.safetensors")
    tensors = {}
    for name, weight in theirs.items():
        stored = name
        for ours, released in () if name.startswith(TOWER) else RELEASED.items():
            stored = stored.replace(ours, released)
        tensors[stored] = weight.detach().clone()
    assert load_file(file).keys() != tensors.keys()
    save_file(tensors, file, metadata={"format": "pt"})
    plan, parts = plan_of(NAME), take_apart(CONFIGS[NAME])
    for stage in plan.stages:
        built = build_stage_module(plan, stage, seed=0, dtype=torch.float64, weights=tmp_path)
        for own, weight in built.named_weights():
            assert torch.equal(weight, theirs[name_in_composite(parts.modules[stage.module], own)]), own
    assert {stage.module for stage in plan.stages} == {VISION, LLM}
