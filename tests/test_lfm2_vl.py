"""LFM2-VL as a whole, and SigLIP 2's tower for images of any size: gradients, layouts, sizes of images."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Siglip2VisionConfig, Siglip2VisionModel

from experiments.doors.families import plan_of
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, owner_of, saved
from runtime.frontend.parallel import Ranks
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from tests import tiny_models
from tests.command_line import accept
from tests.composite_gradients import assert_same_gradients, gradients_of_both
from tests.encoder_cases import wide_rotations  # noqa: F401  (a fixture)
from tests.plans import disjoint_plan
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images, model_of
from tests.test_parity import assert_same
from tests.test_tilings import SIDES, source_of
from workbench.data.sample import Sample, Segment
from workbench.job.job import load_job
from workbench.job.sample_sizes import Tiling, with_sizes
from workbench.model.composites.composite import LLM, VISION, name_in_composite
from workbench.model.composites.registry import take_apart
from workbench.model.families.tiles import LFM2_VL, TILING
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens, split_px
from workbench.model.model_graph import TEXT, ModelGraph, connect

TOWER = tiny_models.SIGLIP2


@pytest.mark.parametrize("grid", [None, (6, 2)])
def test_gradients_are_those_of_the_whole_model(
    grid: tuple[int, int] | None, tmp_path: Path, pool: Pool
) -> None:
    """Of every weight that a module has, with an image of the table's size and with another one."""
    sample = None
    if grid is not None:
        image = Segment(VISION, 0, 12, 3, grid=grid)
        sample = Sample(0, (Segment(TEXT, 0, 5, 5), image, Segment(TEXT, 1, 9, 9)))
    ours, theirs = gradients_of_both("lfm2_vl", plan_of("lfm2_vl", sample), tmp_path / "whole", pool)
    tied = {"model.language_model.embed_tokens.weight", "lm_head.weight"}
    assert ours.keys() - tied == theirs.keys() - tied
    assert_same_gradients(ours, theirs, ours.keys() - tied)


@pytest.mark.parametrize("name", ["lfm2_vl", "cohere2_vision"])
def test_checkpoints_of_older_releases_are_read(name: str, tmp_path: Path) -> None:
    """Whose towers are a part of themselves."""
    model = saved(name, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tower, older = "model.vision_tower.", "model.vision_tower.vision_model."
    tensors = {key.replace(tower, older): each for key, each in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    plan, parts = plan_of(name), take_apart(CONFIGS[name])
    stage = next(each for each in plan.stages if each.module == VISION)
    ours = build_stage_module(plan, stage, seed=0, dtype=torch.float64, weights=tmp_path)
    theirs = dict(model.named_parameters())
    for key, weight in ours.named_weights():
        assert torch.equal(weight, theirs[name_in_composite(parts.modules[VISION], key)]), key


def whole() -> ModelGraph:
    modules = modules_of(dict(take_apart(CONFIGS["lfm2_vl"]).modules))
    return connect("whole", (modules[VISION], modules[LLM]))


@pytest.mark.parametrize("grids", [{VISION: (1, 2), LLM: (1, 2)}, {VISION: (2, 1), LLM: (1, 1)}], ids=str)
def test_towers_and_language_models_on_several_ranks(grids: dict[str, tuple[int, int]], pool: Pool) -> None:
    """Images of unequal grids; the tower's tokens are shared, the language model's are not."""
    first, second = Segment(VISION, 0, 24, 6, grid=(6, 4)), Segment(VISION, 1, 4, 1, grid=(2, 2))
    batch = (
        Sample(0, (Segment(TEXT, 0, 5, 5), first, second)),
        Sample(1, (Segment(VISION, 0, 16, 4), Segment(TEXT, 0, 9, 9))),
        Sample(2, (Segment(TEXT, 0, 7, 7),)),
    )
    graph = whole()
    tower, llm = (len(module.layers) for module in graph.modules)
    assert_same(disjoint_plan(graph, batch, {VISION: (tower,), LLM: (2, llm - 2)}, grids=grids), pool)


def test_full_sizes_are_counted_as_transformers_builds_them() -> None:
    config = transformers.Lfm2VlConfig()
    parts = take_apart(config.to_dict())
    modules = modules_of(dict(parts.modules))
    with torch.device("meta"):
        model = transformers.Lfm2VlForConditionalGeneration(config)
    sizes = dict.fromkeys(modules, 0)
    dropped = tuple(part.weights for part in parts.dropped)
    for name, weight in model.named_parameters():
        if not name.startswith(dropped):
            sizes[owner_of(parts, name)] += weight.numel()
    assert sizes == {name: module.num_parameters for name, module in modules.items()}
    absent = modules_of(dict(take_apart({"model_type": "lfm2_vl"}).modules))
    assert [module.layers for module in absent.values()] == [module.layers for module in modules.values()]


def siglip2() -> PreTrainedModel:
    torch.manual_seed(5)
    sizes = {key: value for key, value in TOWER.items() if key != "model_type"}
    model: PreTrainedModel = Siglip2VisionModel(Siglip2VisionConfig(**sizes))
    return model.double()


def test_it_trains_as_users_tower() -> None:
    """Images of unequal sizes, given as pixels."""
    first, *others = images()
    batch: dict[str, Any] = {"input_ids": ids(), "pixel_values": [first, others, None]}
    assert_parity(model_of(siglip2(), "mlp"), spec_of(num_microbatches=3), batch, ranks=Ranks.EMULATED)


def test_a_table_that_is_no_square_is_refused() -> None:
    config = {**TOWER, "num_patches": 60}
    with pytest.raises(ValueError, match="num_patches must be a square, got 60; nearest: 64"):
        module_from_config(config, name=VISION, modality=VISION, llm_width=32)


@lru_cache
def lfm2_source() -> SimpleNamespace:
    names = ("round_by_factor", "find_closest_aspect_ratio", "smart_resize", "_is_image_too_large")
    more = ("_target_ratios", "_get_grid_layout")
    return source_of("lfm2_vl.image_processing_lfm2_vl", *names, *more)


LIMITS = {"min_image_tokens": 64, "max_image_tokens": 256}
PATCH = {"encoder_patch_size": 16, "downsample_factor": 2}


@given(height=SIDES, width=SIDES)
def test_lfm2_vl_sizes_and_cuts_images_as_its_processor_does(height: int, width: int) -> None:
    config = {**TOWER, "patch_size": 16, TILING: LFM2_VL}
    tower = modules_of(dict(take_apart({**CONFIGS["lfm2_vl"], "vision_config": config}).modules))[VISION]
    theirs = lfm2_source()
    wide, high = theirs.smart_resize(None, height, width, **PATCH, **LIMITS)
    size = image_tokens(tower, height, width)
    assert size == (high // 16 * (wide // 16), high // 32 * (wide // 32))
    cut = split_px(tower, height, width)
    if not theirs._is_image_too_large(
        None, height, width, max_image_tokens=256, max_pixels_tolerance=2.0, **PATCH
    ):
        assert cut == ((height, width),)
        return
    own = SimpleNamespace(_target_ratios=lambda least, most: theirs._target_ratios(None, least, most))
    num = theirs._get_grid_layout(own, height, width, min_tiles=2, max_tiles=10, tile_size=512)[-1]
    assert cut == (*((512, 512),) * num, (height, width))
    assert image_tokens(tower, 512, 512) == (1024, 256)


@given(height=SIDES, width=SIDES, most=st.sampled_from([256, 100, 1024]))
def test_siglip_2_sizes_images_as_its_processor_does(height: int, width: int, most: int) -> None:
    config = {**TOWER, "patch_size": 16, "max_num_patches": most}
    tower = module_from_config(config, name=VISION, modality=VISION, llm_width=32)
    name = "get_image_size_for_max_num_patches"
    source = source_of("lfm2_vl.image_processing_lfm2_vl", name)
    high, wide = source.get_image_size_for_max_num_patches(height, width, 16, most)
    assert image_tokens(tower, height, width).tokens_in == high // 16 * (wide // 16)


def test_jobs_cut_large_images(tmp_path: Path) -> None:
    """A draft from sizes, and a job that is given sizes; as one item where no tiling is asked for."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["lfm2_vl"]))
    tile = {"patch_size": 4, "tile_size": 32, "min_image_tokens": 1, "max_image_tokens": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(tile))
    sizes = tmp_path / "sizes.jsonl"
    rows = ({"text_tokens": 9, "image_width": [width], "image_height": [32]} for width in (96, 32) * 16)
    sizes.write_text("\n".join(map(json.dumps, rows)))
    target = tmp_path / "job.yaml"
    accept("init", tmp_path, "--gpus", "4xA100-80GB", "--data", sizes, "-o", target)
    drafted = load_job(target)
    assert [len(tuple(sample.of(VISION))) for sample in drafted.batch[:3]] == [4, 1, 4]
    job = replace(drafted, batch=drafted.batch[:4])
    for tiling, counts in ((Tiling.ANYRES, [4, 1, 4, 1]), (Tiling.NONE, [1, 1, 1, 1])):
        batch = with_sizes(job, str(sizes), tiling=tiling).batch
        assert sorted(len(tuple(sample.of(VISION))) for sample in batch) == sorted(counts)
