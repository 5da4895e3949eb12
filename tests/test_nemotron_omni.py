"""Nemotron 3 Nano Omni as a whole, and RADIO's tower: gradients, layouts, sizes of images, refusals."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.models.radio import modeling_radio as radio

from experiments.doors.families import plan_of
from experiments.doors.nemotron_configs import RADIO_SEEN
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of
from runtime.frontend.parallel import Ranks
from runtime.models.choose import adapter_of
from runtime.world.pool import Pool
from tests.composite_gradients import assert_same_gradients, gradients_of_both
from tests.encoder_cases import wide_rotations  # noqa: F401  (a fixture)
from tests.plans import disjoint_plan
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images, model_of
from tests.test_parity import assert_same
from tests.test_tilings import SIDES, source_of
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import class_tokens, image_tokens, video_of
from workbench.model.layer import Matmul
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.plan import ModuleSettings
from workbench.plan.runnable_items import check_segment

NAME, EXPERTS = "nemotron_h_omni", "nemotron_h_omni, experts"
NUM_CLASS = 5


def seen(k: int, rows: int, columns: int) -> Segment:
    """An image of so many patches."""
    num = rows * columns
    return Segment(VISION, k, num + NUM_CLASS, num // 4, grid=(rows, columns))


SAID = Segment(TEXT, 0, 5, 5)
BATCH = (
    Sample(0, (SAID, seen(0, 4, 6), seen(1, 4, 2))),
    Sample(1, (seen(0, 4, 4), SAID)),
    Sample(2, (Segment(TEXT, 0, 9, 9),)),
)


def whole(name: str = NAME, trained: dict[str, Trainable] | None = None) -> ModelGraph:
    """The tower before its language model."""
    modules = modules_of(dict(take_apart(CONFIGS[name]).modules))
    kept = {**dict.fromkeys(modules, Trainable.ALL), **(trained or {})}
    tower, llm = (with_trainable(modules[called], kept[called]) for called in (VISION, LLM))
    return connect("whole", (tower, llm))


def cuts_of(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    tower, llm = (len(module.layers) for module in graph.modules)
    return {VISION: (tower,), LLM: (2, llm - 2)}


@pytest.mark.parametrize("name", [NAME, EXPERTS])
@pytest.mark.parametrize("grid", [None, (6, 2), (8, 8)], ids=str)
def test_gradients_are_those_of_the_whole_model(
    name: str, grid: tuple[int, int] | None, tmp_path: Path, pool: Pool
) -> None:
    """Of every weight that a module has, also for images wider or larger than the table of positions."""
    sample = None
    if grid is not None:
        sample = Sample(0, (SAID, seen(0, *grid), Segment(TEXT, 1, 9, 9)))
    ours, theirs = gradients_of_both(name, plan_of(name, sample), tmp_path / "whole", pool)
    assert ours.keys() == theirs.keys()
    assert_same_gradients(ours, theirs, ours.keys())


@pytest.mark.parametrize("name", [NAME, EXPERTS])
@pytest.mark.parametrize("grids", [{VISION: (1, 2), LLM: (1, 2)}, {VISION: (2, 1), LLM: (1, 1)}], ids=str)
def test_several_ranks_train_as_one_process(name: str, grids: dict[str, tuple[int, int]], pool: Pool) -> None:
    """Tensor-parallel ranks of both; and ranks that share the tower's tokens, class tokens among them."""
    graph = whole(name)
    assert_same(disjoint_plan(graph, BATCH, cuts_of(graph), grids=grids), pool)


def test_sequence_parallel_ranks(pool: Pool) -> None:
    graph = whole()
    divided = tuple(ModuleSettings(module=module.name, sequence_parallel=True) for module in graph.modules)
    plan = disjoint_plan(graph, BATCH, cuts_of(graph), grids={VISION: (1, 2), LLM: (1, 2)})
    assert_same(replace(plan, settings=replace(plan.settings, modules=divided)), pool)


def test_replicas_and_stages(pool: Pool) -> None:
    graph = whole()
    cuts = {module.name: (2, len(module.layers) - 2) for module in graph.modules}
    assert_same(disjoint_plan(graph, BATCH[:2], cuts, replicas=2), pool)


@pytest.mark.parametrize(
    "trained",
    [
        {VISION: Trainable.NONE},
        {VISION: Trainable.PROJECTOR, LLM: Trainable.NONE},
        {LLM: Trainable.NONE},
    ],
    ids=str,
)
def test_frozen_parts(trained: dict[str, Trainable], pool: Pool) -> None:
    graph = whole(trained=trained)
    assert_same(disjoint_plan(graph, BATCH, cuts_of(graph)), pool)


def tower(**more: Any) -> Module:
    """As before Nemotron, with patches of 16 pixels."""
    sizes = {**RADIO_SEEN, "patch_size": 16, "min_num_patches": None, **more}
    return modules_of(dict(take_apart({**CONFIGS[NAME], "vision_config": sizes}).modules))[VISION]


@cache
def processor() -> SimpleNamespace:
    return source_of("nemotron_h_omni.image_processing_nemotron_h_omni", "get_patch_grid_size")


@given(
    height=SIDES,
    width=SIDES,
    limits=st.sampled_from([{}, {"min_num_patches": 64, "max_num_patches": 128}, {"max_num_patches": 0}]),
    context=st.sampled_from([16_384, 64]),
)
def test_images_are_sized_as_by_its_processor(
    height: int, width: int, limits: dict[str, int], context: int
) -> None:
    """Or refused where a side vanishes; its processor gives all images of a call one limit."""
    given_limits = {"min_num_patches": 1024, "max_num_patches": 13_312, **limits}
    least, limit = given_limits["min_num_patches"], given_limits["max_num_patches"]
    most = max((context - 4) * 4, least)
    most = max(min(most, limit) if limit else most, least)
    part = tower(**limits, max_model_len=context)
    try:
        rows, columns = processor().get_patch_grid_size(height, width, 16, 2, least, most)
    except ZeroDivisionError:
        rows = columns = 0
    if not rows * columns:
        with pytest.raises(ValueError, match="its shorter side must keep one; nearest: a shorter side of"):
            image_tokens(part, height, width)
        return
    size = image_tokens(part, height, width)
    assert tuple(size) == (rows * columns + NUM_CLASS, rows * columns // 4)
    check_segment(part, Segment(VISION, 0, *size, (rows, columns)))


def test_products_of_a_block_are_counted_by_hand() -> None:
    """FLOP of C-RADIOv4-H's block: 12 products of 1280 x 1280 a token, class tokens included."""
    part = module_from_config({"model_type": "radio"}, name=VISION, modality=VISION, llm_width=64)
    products = [op for op in part.layers[1].operators if isinstance(op, Matmul)]
    assert sum(op.in_features * op.out_features for op in products) == 12 * 1280**2
    assert class_tokens(part.layers[0]) == 10
    embed = next(op for op in part.layers[0].operators if isinstance(op, Matmul))
    assert (embed.in_features, embed.out_features, embed.bias) == (3 * 16**2, 1280, False)
    assert part.layers[0].num_parameters == 1280 * (3 * 16**2 + 10 + 128**2)


def test_an_item_of_class_tokens_alone_is_refused() -> None:
    part = whole().modules[0]
    with pytest.raises(ValueError, match="want more tokens than the class token, got 5"):
        check_segment(part, Segment(VISION, 0, NUM_CLASS, 1))
    with pytest.raises(ValueError, match="no patches left besides the class token"):
        adapter_of(part).raw_shape(Segment(VISION, 0, NUM_CLASS, 1))


def test_videos_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="module 'vision': no rule says which frames of a video it sees"):
        video_of(whole().modules[0], 64, 64, 2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"downsample_ratio": 0.25}, "nemotron_h_omni: downsample_ratio must be 0.5, got 0.25"),
        (
            {"vision_hidden_size": 40},
            "must be the tower's hidden_size 24, got 40; nearest: 24",
        ),
        ({"audio_config": {}}, "parakeet_encoder: projection_hidden_size must be"),
        (
            {"vision_config": {**RADIO_SEEN, "max_img_size": 3}},
            "radio: max_img_size must be patch_size 4 or more, got 3; nearest: 4",
        ),
    ],
)
def test_what_cannot_be_said_is_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as info:
        modules_of(dict(take_apart({**CONFIGS[NAME], **change}).modules))
    assert "\n" not in str(info.value)


def test_names_of_released_checkpoints_are_those_of_transformers() -> None:
    """Where both are given, transformers' own name counts."""
    config = CONFIGS[NAME]
    earlier = {"text_config": "llm_config", "vision_hidden_size": "vit_hidden_size"}
    earlier["image_token_id"] = "img_context_token_id"
    renamed = {earlier.get(key, key): value for key, value in config.items()}
    assert take_apart(renamed) == take_apart(config)
    both = {**renamed, "llm_config": {}, "text_config": config["text_config"]}
    assert take_apart(both) == take_apart(config)
    assert take_apart({**config, "img_context_token_id": 7}).token_ids == {VISION: 90}


def radio_model(**more: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    model: PreTrainedModel = radio.RadioModel(radio.RadioConfig(**RADIO_SEEN, **more)).double()
    return model


def user_batch() -> dict[str, Any]:
    """Images of unequal sizes, whose numbers float32 has, too."""
    first, *others = (image.float().double() for image in images())
    return {"input_ids": ids(), "pixel_values": [first, others, None]}


@pytest.mark.parametrize("is_external", [True, False])
def test_a_users_tower_reads_normalised_pixels(is_external: bool) -> None:
    """Without its own normalisation, or with one that changes nothing."""
    model: Any = radio_model(norm_mean=[0.0] * 3, norm_std=[1.0] * 3)
    if is_external:
        model.make_preprocessor_external()
    spec = spec_of(num_microbatches=3)
    assert_parity(model_of(model, "mlp"), spec, user_batch(), ranks=Ranks.EMULATED)


def test_a_users_tower_that_normalises_pixels_is_refused() -> None:
    model, spec = model_of(radio_model(), "mlp"), spec_of(num_microbatches=3)
    with pytest.raises(ValueError, match=r"the buffer 'input_conditioner\.norm_mean', which the runtime"):
        assert_parity(model, spec, user_batch(), ranks=Ranks.EMULATED)
