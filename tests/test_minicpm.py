"""MiniCPM: sizes and slices of images as its processors make them, positions in a row, refusals."""

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of
from runtime.data.batches import axes_of
from tests.test_tilings import SIDES, source_of
from workbench.cost.roofline import RowWork, Work, layer_flop
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens, source_config, split_px
from workbench.model.model_graph import TEXT, Module

NAME, FEW = "minicpm_ocr", "minicpmv4_6"


@lru_cache
def processor() -> SimpleNamespace:
    names = ("find_best_resize", "get_refine_size", "get_sliced_grid", "ensure_divide")
    theirs = source_of("minicpmv4_6.image_processing_minicpmv4_6", *names)
    for name, function in vars(theirs).items():
        setattr(theirs, name, function if name == "ensure_divide" else function.__get__(theirs))
    return theirs


def tower(name: str = NAME, **more: Any) -> Module:
    seen = {**CONFIGS[name]["vision_config"], "patch_size": 14, "image_size": 56, **more}
    return modules_of(dict(take_apart({**CONFIGS[name], "vision_config": seen}).modules))[VISION]


@pytest.mark.parametrize(("name", "mode", "square"), [(NAME, "4x", 2), (FEW, "16x", 4)])
@given(height=SIDES, width=SIDES, most=st.sampled_from([9, 4, 1]), side=st.sampled_from([448, 224]))
def test_images_are_sliced_and_sized_as_by_its_processor(
    name: str, mode: str, square: int, height: int, width: int, most: int, side: int
) -> None:
    """The whole, and every slice."""
    theirs, module = processor(), tower(name, max_slice_nums=most, scale_resolution=side)
    grid = theirs.get_sliced_grid((height, width), most, side)
    shared: dict[str, Any] = {"scale_resolution": side, "patch_size": 14, "downsample_mode": mode}
    high, wide = theirs.find_best_resize((height, width), allow_upscale=grid is None, **shared)
    wanted = [(high // 14 * (wide // 14), high // 14 // square * (wide // 14 // square))]
    if grid is not None:
        high, wide = theirs.get_refine_size((height, width), grid, allow_upscale=True, **shared)
        rows, columns = (side // parts // 14 for side, parts in zip((high, wide), grid, strict=True))
        wanted += [(rows * columns, rows // square * (columns // square))] * (grid[0] * grid[1])
    assert [image_tokens(module, *piece) for piece in split_px(module, height, width)] == wanted


def test_images_may_stay_whole() -> None:
    assert split_px(tower(slice_mode=False), 2000, 1000) == ((2000, 1000),)
    assert len(split_px(tower(), 2000, 1000)) == 9


def test_sizes_that_depend_on_what_an_image_shows_are_refused() -> None:
    with pytest.raises(ValueError, match="small_image_upsize must be always, got 'adaptive'"):
        image_tokens(tower(small_image_upsize="adaptive"), 100, 100)


def test_tokens_of_an_image_are_in_a_row() -> None:
    """Though the language model has three axes."""
    modules = modules_of(dict(take_apart(CONFIGS[NAME]).modules))
    sample = Sample(0, (Segment(TEXT, 0, 2, 2), Segment(VISION, 0, 16, 4), Segment(TEXT, 1, 1, 1)))
    assert torch.equal(axes_of(modules.values(), (sample,)), torch.arange(7).expand(3, -1))


def test_squares_of_another_side_are_refused() -> None:
    with pytest.raises(ValueError, match=r"merge_kernel_size must be \[2, 2\], got \[4, 4\]"):
        take_apart({**CONFIGS[NAME], "merge_kernel_size": [4, 4]})


def test_a_block_behind_the_merger_costs_as_much_as_one_over_squares() -> None:
    """FLOP of all its operators, attention among them, and bytes that it hands on."""
    few, many = tower(FEW).layers, tower(NAME).layers
    squares, patches = (Work((RowWork(tokens, 1, tokens**2),)) for tokens in (12, 48))
    assert few[3].num_parameters == many[3].num_parameters
    assert layer_flop(few[3], patches) == layer_flop(many[3], squares)
    assert 48 * few[3].out_width == 12 * many[3].out_width
    assert layer_flop(few[1], patches) == layer_flop(many[1], patches)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"insert_layer_id": 4}, "insert_layer_id must be one of the blocks 0 to 3, got 4; nearest: 3"),
        ({"downsample_mode": "8x"}, "downsample_mode must be '4x' or '16x', got '8x'; nearest: '16x'"),
    ],
)
def test_a_merger_nowhere_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        modules_of(dict(take_apart({**CONFIGS[FEW], **change}).modules))


def test_a_state_before_the_merger_is_not_read() -> None:
    config = source_config(tower(FEW))
    with pytest.raises(ValueError, match="it merges tokens inside: it has no feature_layer, got -2"):
        module_from_config(config, name=VISION, modality=VISION, llm_width=48, feature_layer=-2)
