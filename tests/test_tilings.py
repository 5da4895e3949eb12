"""How many tiles an image becomes, held against transformers' own processors; where commands count them."""

import ast
import json
import math
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlavaNextConfig, LlavaOnevisionConfig, LlavaOnevisionModel
from transformers.image_processing_utils import select_best_resolution
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from tests.command_line import accept
from tests.test_composites import CONFIGS
from workbench.data.corpus import ItemTokens
from workbench.data.tilings import (
    cohere_tiles,
    idefics3_tiles,
    internvl_tiles,
    llama4_tiles,
    phi4_canvas,
)
from workbench.job.draft import Train, draft, machines_of
from workbench.job.drafted_batch import WantedBatch
from workbench.job.job import Job, load_job
from workbench.model.families.tiles import COMMAND_A, TILING, anyres, ovis2
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import native_tokens, tile_tokens
from workbench.model.model_graph import Module
from workbench.plan.runnable_items import check_segment

EDGES = sorted({px * num + more for px in (336, 364, 448) for num in range(1, 9) for more in (-1, 0, 1)})
SIDES = st.integers(1, 5000) | st.sampled_from(EDGES)
TILE = ItemTokens(576, 144)
VIT = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "patch_size": 14}


def source_of(module: str, *names: str, **known: Any) -> SimpleNamespace:
    """Bare functions and methods of a processor, read from its file: to import it takes torchvision."""
    found = find_spec(f"transformers.models.{module}")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    wanted = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name in names]
    for function in wanted:
        function.returns, function.decorator_list = None, []
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
    space: dict[str, Any] = {"torch": torch, "math": math, "np": np, "SizeDict": SizeDict, **known}
    exec(compile(ast.Module(wanted, []), found.origin, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


@given(height=SIDES, width=SIDES, limits=st.sampled_from([(1, 12), (3, 7), (1, 1)]))
def test_internvl_cuts_the_nearest_canvas(height: int, width: int, limits: tuple[int, int]) -> None:
    least, most = limits
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=least, max_patches=most
    )
    expected = theirs.get_number_of_image_patches(height, width)
    assert internvl_tiles(height, width, tile_px=448, least=least, most=most) == expected


@given(
    height=SIDES,
    width=SIDES,
    edges=st.sampled_from([(1456, 364), (2048, 512), (364, 364), (1000, 364), (5000, 364)]),
)
def test_idefics3_cuts_what_it_enlarged(height: int, width: int, edges: tuple[int, int]) -> None:
    longest, tile = edges
    theirs = idefics3.Idefics3ImageProcessorPil()
    theirs.resize = lambda image, size, resample=None: np.broadcast_to(image[:1, :1, :1], (3, *size_of(size)))
    image = np.broadcast_to(np.float32(0), (3, height, width))
    high, wide = idefics3.get_resize_output_image_size(image, longest)
    image = theirs.resize_for_vision_encoder(np.broadcast_to(np.float32(0), (3, high, wide)), tile)
    frames, _, _ = theirs.split_images(image, {"longest_edge": tile})
    assert idefics3_tiles(height, width, tile_px=tile, longest_px=longest) == len(frames)


def size_of(size: SizeDict) -> tuple[int, int]:
    assert size.height is not None
    assert size.width is not None
    return size.height, size.width


@cache
def llama4_source() -> SimpleNamespace:
    names = ("get_factors", "find_supported_resolutions", "get_best_fit")
    return source_of("llama4.image_processing_llama4", *names, defaultdict=defaultdict)


@given(height=SIDES, width=SIDES, most=st.sampled_from([16, 5, 1]))
def test_llama_4_takes_the_best_fit(height: int, width: int, most: int) -> None:
    size = SizeDict(height=336, width=336)
    canvases = torch.tensor(llama4_source().find_supported_resolutions(max_num_chunks=most, patch_size=size))
    rows, columns = (int(side) // 336 for side in llama4_source().get_best_fit((height, width), canvases))
    expected = 1 + rows * columns if rows * columns > 1 else 1
    assert llama4_tiles(height, width, tile_px=336, most=most) == expected


@cache
def cohere_source() -> SimpleNamespace:
    names = ("get_all_supported_aspect_ratios", "get_optimal_tiled_canvas")
    return source_of("cohere2_vision.image_processing_cohere2_vision", *names)


@given(height=SIDES, width=SIDES, most=st.sampled_from([12, 5, 1]))
def test_command_a_vision_stretches_least(height: int, width: int, most: int) -> None:
    columns, rows = cohere_source().get_optimal_tiled_canvas((height, width), (336, 336), 1, most)
    expected = 1 + rows * columns if rows * columns > 1 else 1
    assert cohere_tiles(height, width, tile_px=336, most=most) == expected
    config = {"model_type": "siglip_vision_model", "image_size": 336, "patch_size": 14, "max_patches": most}
    cut = anyres({**config, TILING: COMMAND_A}, ItemTokens(576, 144), height, width)
    assert cut == (ItemTokens(576, 144),) * expected


@cache
def ovis2_source() -> SimpleNamespace:
    names = ("get_all_supported_aspect_ratios", "compute_patch_covering_area", "split_image_into_grid")
    whole = (*names, "get_min_tile_covering_grid", "get_optimal_tiled_canvas")
    return source_of("ovis2.image_processing_ovis2", *whole)


@given(height=SIDES, width=SIDES, most=st.sampled_from([12, 9, 1]), covers=st.booleans())
def test_ovis_2_shows_most_of_the_image(height: int, width: int, most: int, covers: bool) -> None:
    size, theirs = (height, width), ovis2_source()
    first, second = (
        theirs.get_min_tile_covering_grid(size, 336, most)
        if covers
        else theirs.get_optimal_tiled_canvas(size, (336, 336), 1, most)
    )
    expected = 1 + first * second if first * second > 1 else 1
    config = {"model_type": "ovis2_vision", "image_size": 336, "max_patches": most}
    config |= {"use_covering_area_grid": covers}
    assert ovis2(config, TILE, height, width) == (TILE,) * expected
    assert ovis2({**config, "crop_to_patches": False}, TILE, height, width) == (TILE,)


@cache
def phi4_source() -> SimpleNamespace:
    def padded(image: torch.Tensor, by: list[int], fill: Any) -> torch.Tensor:
        return torch.empty(3, image.shape[1] + by[3], image.shape[2] + by[2], device="meta")

    functional = SimpleNamespace(resize=lambda image, size: torch.empty(3, *size, device="meta"), pad=padded)
    names = ("find_closest_aspect_ratio", "dynamic_preprocess")
    return source_of("phi4_multimodal.image_processing_phi4_multimodal", *names, tvF=functional)


@given(height=SIDES, width=SIDES, most=st.sampled_from([36, 5]))
def test_phi_4_cuts_what_the_image_begins(height: int, width: int, most: int) -> None:
    theirs = SimpleNamespace(
        find_closest_aspect_ratio=lambda *given: phi4_source().find_closest_aspect_ratio(None, *given)
    )
    image = torch.empty(1).expand(3, height, width)
    try:
        resized, seen = phi4_source().dynamic_preprocess(theirs, image, 448, 14, 32, max_num=most)
    except ValueError:
        with pytest.raises(ValueError, match="its shorter side must keep 10 px; nearest: a shorter side of"):
            phi4_canvas(height, width, tile_px=448, most=most)
        return
    expected = 1 + (resized.shape[1] // 448) * (resized.shape[2] // 448)
    assert phi4_canvas(height, width, tile_px=448, most=most).num_tiles == expected
    config = {"model_type": "siglip_vision_model", "image_size": 448, "patch_size": 14, "dynamic_hd": most}
    tiles = anyres(config, ItemTokens(1024, 256), height, width)
    assert tiles[0] == ItemTokens(1024, 256)
    assert len(tiles) == expected
    seen = (seen != 0).reshape(resized.shape[1] // 448, 32, resized.shape[2] // 448, 32)
    assert sum(tile.tokens_out for tile in tiles[1:]) == int(seen[:, 0::2, :, 0::2].sum())


GRIDS = {"llava_next": LlavaNextConfig(), "llava_onevision": LlavaOnevisionConfig()}
PROCESSORS = {
    "llava_next": (LlavaNextProcessor, 336, 576),
    "llava_onevision": (LlavaOnevisionProcessor, 384, 729),
}


@given(name=st.sampled_from(sorted(GRIDS)), height=SIDES, width=SIDES)
def test_llava_cuts_the_grids_of_its_composite_whose_padding_does_not_reach_the_llm(
    name: str, height: int, width: int
) -> None:
    """As many tokens as the composite's processor counts, without its ends of rows."""
    processor, side, tokens = PROCESSORS[name]
    said: dict[str, Any] = {"image_grid_pinpoints": GRIDS[name].image_grid_pinpoints}
    if name == "llava_onevision":
        said["vision_aspect_ratio"] = "anyres_max_9"
    theirs = SimpleNamespace(vision_aspect_ratio="anyres_max_9")
    rows, columns = (
        px // side for px in select_best_resolution((height, width), GRIDS[name].image_grid_pinpoints)
    )
    along = math.isqrt(tokens)
    left, _ = processor._get_unpadded_features(theirs, height, width, along, along, rows, columns)
    config = {"model_type": "vit", "image_size": side, **said}
    if left < rows * columns:
        with pytest.raises(ValueError, match=f" {left} tokens of {rows * columns} tiles reach the LLM"):
            anyres(config, ItemTokens(tokens, tokens), height, width)
        return
    whole, *tiles = anyres(config, ItemTokens(tokens, tokens), height, width)
    assert whole == ItemTokens(tokens, tokens)
    assert len(tiles) == rows * columns
    assert sum(tile.tokens_out for tile in tiles) == left


@pytest.mark.parametrize("rows", range(1, 7))
@pytest.mark.parametrize("columns", [1, 2, 5, 6])
def test_onevision_shrinks_features_of_many_tiles(rows: int, columns: int) -> None:
    """As many reach the LLM as `pack_image_features` leaves, without its ends of rows."""
    config = GRIDS["llava_onevision"]
    size = (384 * rows, 384 * columns)
    features = torch.zeros(1 + rows * columns, 729, 1)
    _, lengths = LlavaOnevisionModel.pack_image_features(
        SimpleNamespace(config=config), [features], torch.tensor([size]), None, "anyres_max_9"
    )
    said = {"image_grid_pinpoints": config.image_grid_pinpoints, "vision_aspect_ratio": "anyres_max_9"}
    tiles = anyres({"model_type": "vit", "image_size": 384, **said}, ItemTokens(729, 729), *size)
    assert len(tiles) == 1 + rows * columns
    assert {tile.tokens_in for tile in tiles} == {729}
    assert sum(tile.tokens_out for tile in tiles) == lengths.item()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"image_grid_pinpoints": [[100, 384]]}, "must be pairs of multiples of image_size 384, got"),
        (
            {"image_grid_pinpoints": [[384, 384 * 4097]]},
            "must make at most 4096 tiles of image_size 384, got",
        ),
        ({"image_grid_pinpoints": 7}, "must be pairs of multiples of image_size 384, got 7"),
        (
            {"vision_aspect_ratio": "anyres_max_no"},
            "must end with a number of tiles >= 1, got 'anyres_max_no'",
        ),
        ({"dynamic_hd": "many"}, "dynamic_hd must be a whole number"),
    ],
)
def test_bad_words_of_tiles_are_named(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        anyres({"model_type": "vit", "image_size": 384, **said}, ItemTokens(729, 729), 500, 900)


def test_more_tiles_than_features_are_refused() -> None:
    """Grids of 256 px before a tower of 4 px."""
    said = {"image_grid_pinpoints": [[256, 256]], "vision_aspect_ratio": "anyres_max_9"}
    with pytest.raises(ValueError, match="8 tokens of 4096 tiles reach the LLM; want one a tile"):
        anyres({"model_type": "vit", "image_size": 4, **said}, ItemTokens(1, 1), 500, 900)


def tower(model_type: str, **more: Any) -> Module:
    return module_from_config(
        {"model_type": model_type, **VIT, **more}, name="vision", modality="vision", llm_width=64
    )


@pytest.mark.parametrize(
    ("module", "tiles"),
    [
        pytest.param(tower("internvl_vision", image_size=448), 9, id="internvl"),
        pytest.param(tower("internvl_vision", image_size=448, max_patches=6), 3, id="internvl-at-most-six"),
        pytest.param(tower("internvl_vision", image_size=[448, 448]), 9, id="internvl-as-released"),
        pytest.param(tower("idefics3_vision", image_size=364), 13, id="idefics3"),
        pytest.param(tower("llama4_vision_model", image_size=336), 16, id="llama4"),
        pytest.param(tower("siglip_vision_model", image_size=448, dynamic_hd=36), 16, id="phi4"),
    ],
)
def test_a_towers_own_rule_cuts_a_full_hd_image(module: Module, tiles: int) -> None:
    assert tile_tokens(module, 1080, 1920) == (native_tokens(module),) * tiles


def test_a_full_hd_image_before_llavas_tower_fills_28_of_48_rows() -> None:
    tiles = tile_tokens(tower("clip_vision_model", image_size=336), 1080, 1920)
    assert tiles == (ItemTokens(577, 576), *(ItemTokens(577, 28 * 48 // 4),) * 4)


def drafted(folder: Path, name: str, *more: str) -> Job:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    row = {"text_tokens": 9, "image_width": 1920, "image_height": 1080}
    (folder / "sizes.jsonl").write_text("\n".join([json.dumps(row)] * 64))
    accept("init", str(folder), "--gpus", "4xH100", "-o", str(folder / "job.yaml"), *more)
    return load_job(folder / "job.yaml")


def test_tiles_of_an_image_of_mllama_are_one_item(tmp_path: Path) -> None:
    """It has room for all of them; five of AnyRes's were counted, each of that size."""
    module = drafted(tmp_path, "mllama").model.module("vision")
    assert tile_tokens(module, 1080, 1920) == (native_tokens(module),)


@pytest.mark.parametrize("name", ["internvl", "idefics3", "llama4"])
def test_a_batch_like_large_images_has_their_tiles(name: str, tmp_path: Path) -> None:
    """All of which the runtime takes, though it cuts off no padding."""
    job = drafted(tmp_path, name, "--data", str(tmp_path / "sizes.jsonl"))
    for segment in (segment for sample in job.batch for segment in sample.of("vision")):
        check_segment(job.model.module("vision"), segment)
    made = draft(
        str(tmp_path),
        machines_of("4xH100", None),
        train=Train.ALL,
        wanted=WantedBatch(data=tmp_path / "sizes.jsonl"),
    )
    tiles = tile_tokens(made.model.module("vision"), 1080, 1920)
    assert len(tiles) > 1
    assert {len(sample.of("vision")) for sample in job.batch} == {len(tiles)}
    assert "tiling: anyres" in made.text
