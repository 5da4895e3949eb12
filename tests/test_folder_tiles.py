"""Images of a data folder in tiles: cut as transformers' processor does, counted as the plan does, run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from experiments.doors.whole_models import modules_of
from runtime.data.dataset import FolderSource, samples_of
from runtime.data.image_tiles import tiles_of
from runtime.data.records import VOCAB_SIZE
from runtime.emulation.emulate import emulate
from runtime.preprocess.source import rule_of, source_of
from runtime.run_settings import RunSettings
from tests.examples import examples
from tests.plans import disjoint_plan
from tests.test_packed_tiles import GRIDS, SIDE_PX, config_of
from workbench.model.composites.composite import LLM
from workbench.model.composites.registry import take_apart
from workbench.model.item_tokens import image_tokens
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision
from workbench.plan.runnable import check_runnable

SIZES = ((20, 31), (60, 9), (33, 33))  # (height, width) in px


def drawn(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


@given(height=st.integers(4, 90), width=st.integers(4, 90))
@examples(40)
def test_tiles_are_those_of_llava_nexts_processor(height: int, width: int) -> None:
    theirs = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE_PX},
        crop_size={"height": SIDE_PX, "width": SIDE_PX},
        image_grid_pinpoints=GRIDS["llava_next"],
        resample=Image.Resampling.BILINEAR,
        do_normalize=False,
        do_rescale=False,
    )
    image = drawn(height, width)
    rows, columns = (px // SIDE_PX for px in select_best_resolution((height, width), GRIDS["llava_next"]))
    expected = theirs(image, return_tensors="np")["pixel_values"][0]
    found = [np.array(tile).transpose(2, 0, 1) for tile in tiles_of(image, (rows, columns), SIDE_PX)]
    assert np.array_equal(np.stack(found), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three samples of an image, and one of two."""
    target = tmp_path_factory.mktemp("images")
    rows = []
    for index, size in enumerate(SIZES):
        drawn(*size).save(target / f"{index}.png")
        rows.append({"id": index, "segments": [{"image": f"{index}.png"}, {"text": "seen"}]})
    both = [{"image": "0.png"}, {"text": "and"}, {"image": "1.png"}, {"text": "seen"}]
    rows.append({"id": len(rows), "segments": both})
    (target / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return target


def graph(kind: str) -> ModelGraph:
    config = config_of(kind)
    made = modules_of(
        dict(take_apart(config | {"text_config": config["text_config"] | {"vocab_size": VOCAB_SIZE}}).modules)
    )
    return connect(kind, [made["vision"], made[LLM]])


def plan_of(kind: str, folder: Path) -> Plan:
    model = graph(kind)
    cuts = {module.name: (2, len(module.layers) - 2) for module in model.modules}
    return disjoint_plan(model, samples_of(folder, model), cuts)


@pytest.mark.parametrize("kind", GRIDS)
def test_a_folders_images_are_counted_and_trained(kind: str, folder: Path) -> None:
    plan = plan_of(kind, folder)
    check_runnable(plan)
    vision = plan.model.module("vision")
    for sample, size in zip(plan.batch, SIZES, strict=False):
        (segment,) = sample.of("vision")
        tokens, grid, unpadded = image_tokens(vision, *size)
        assert (segment.tokens_in, segment.tokens_out) == tokens
        assert (segment.grid, segment.unpadded) == (grid, unpadded)
    several = [segment.num_tiles for segment in plan.batch[-1].of("vision")]
    assert several == ([1, 1] if kind == "llava_onevision" else [5, 4])
    source = source_of(str(folder), None, plan, timeout_s=1.0)
    how = RunSettings(steps=4, warmup=0, precision=Precision.FLOAT64)
    losses = emulate(lower(plan), how, source=source).losses
    assert losses[-1] < losses[0]


def test_an_image_of_one_colour_is_black_where_it_is_padded(tmp_path: Path) -> None:
    Image.new("RGB", (31, 20), (255, 255, 255)).save(tmp_path / "white.png")
    row = {"id": 0, "segments": [{"image": "white.png"}, {"text": "x"}]}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n")
    (sample,) = samples_of(tmp_path, graph("llava_next"))
    (segment,) = sample.of("vision")
    shape = (segment.num_tiles, 3, SIDE_PX, SIDE_PX)
    tiles = FolderSource(tmp_path).raw(0, segment, shape)
    assert tiles.shape == shape
    assert torch.equal(tiles[0], torch.ones(shape[1:]))
    assert set(tiles.unique().tolist()) == {-1.0, 1.0}


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("nothing")
    row = {"id": 0, "segments": [{"image": "bad.png"}, {"text": "x"}]}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=r"image .*bad.png: cannot be read"):
        samples_of(tmp_path, graph("llava_next"))


def test_a_preprocessing_server_makes_no_tiles(folder: Path) -> None:
    plan = plan_of("llava_next", folder)
    with pytest.raises(ValueError, match="'vision' puts tiles of images together, which a preprocessing"):
        rule_of(plan.model)
    with pytest.raises(ValueError, match="'vision' puts tiles of images together, which a preprocessing"):
        source_of("tcp://127.0.0.1:9", None, plan, timeout_s=1.0)
    assert {segment.modality for sample in plan.batch for segment in sample.segments} == {TEXT, "vision"}
