"""Gemma 4 with images: gradients of the whole model, ranks, sizes of images, published sizes, refusals."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, owner_of
from experiments.doors.whole_sizes import GEMMA4_SEEN
from runtime.data.batches import SyntheticSource
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.norm import widen_norms
from runtime.reference import reference_step
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from tests import user_models
from tests.composite_gradients import assert_same_gradients, gradients_of_both
from tests.plans import disjoint_plan, finish
from tests.test_adapters_encoders import widen_vision_rotations
from tests.test_adapters_gemma4 import PUBLISHED, PUBLISHED_SPARSE
from tests.test_composites_weights import plan_of
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images
from tests.test_parity import assert_same
from tests.user_models import VISION as VISION_ID
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import image_tokens
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect
from workbench.plan.plan import ModuleSettings
from workbench.plan.runnable import check_family
from workbench.plan.stage import Stage

torch.set_num_threads(1)
F64 = torch.float64
NAMES = ("gemma4", "gemma4, experts")
PUBLISHED_SEEN = {
    "model_type": "gemma4_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_vision_rotations(monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_model(name: str, tmp_path: Any, pool: Pool) -> None:
    """Of every weight, the tower's and the language model's, on a stage each and two."""
    ours, theirs = gradients_of_both(name, plan_of(name), tmp_path / "whole", pool)
    assert ours.keys() - theirs.keys() <= {"lm_head.weight"}  # where it is the table
    assert theirs.keys() <= ours.keys()
    assert_same_gradients(ours, theirs, theirs)


def whole(name: str = "gemma4") -> ModelGraph:
    modules = modules_of(dict(take_apart(CONFIGS[name]).modules))
    return connect("whole", (modules[VISION], modules[LLM]))


def images_and_texts() -> tuple[Sample, ...]:
    """Images of other sizes and grids, two of them in one sample, and a sample without; of two masks."""
    mask = "gemma4"
    seen, said = Segment(VISION, 0, 24, 6), Segment(TEXT, 0, 5, 5)
    return (
        Sample(0, (said, seen, Segment(TEXT, 1, 4, 4)), mask),
        Sample(1, (Segment(VISION, 0, 16, 4, (2, 8)), said, Segment(VISION, 1, 24, 6, (6, 4))), mask),
        Sample(2, (Segment(TEXT, 0, 7, 7),)),
        Sample(3, (seen, said)),
    )


def cuts_of(graph: ModelGraph) -> dict[str, tuple[int, int]]:
    return {module.name: (2, len(module.layers) - 2) for module in graph.modules}


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_of_a_tower_and_of_a_language_model_split_tokens(name: str, pool: Pool) -> None:
    graph = whole(name)
    tower = len(graph.modules[0].layers)
    divided = tuple(ModuleSettings(module=module.name, sequence_parallel=True) for module in graph.modules)
    cuts = {VISION: (tower,), LLM: cuts_of(graph)[LLM]}
    plan = disjoint_plan(graph, images_and_texts(), cuts, grids={VISION: (1, 2), LLM: (1, 2)})
    assert_same(replace(plan, settings=replace(plan.settings, modules=divided)), pool)


def test_context_parallel_replicas_and_stages(pool: Pool) -> None:
    graph = whole()
    assert_same(disjoint_plan(graph, images_and_texts(), cuts_of(graph), grids={LLM: (2, 1)}), pool)
    assert_same(disjoint_plan(graph, images_and_texts()[:2], cuts_of(graph), replicas=2), pool)


def test_experts_over_two_ranks_behind_a_tower(pool: Pool) -> None:
    graph = whole("gemma4, experts")
    stages = [
        Stage(id=i, module=module.name, replica=0, layers=(0, len(module.layers)), ranks=ranks, ep=ep)
        for i, (module, ranks, ep) in enumerate(zip(graph.modules, (((0,),), ((1, 2),)), (1, 2), strict=True))
    ]
    assert_same(finish(graph, images_and_texts(), stages), pool)


@pytest.mark.parametrize("text", [PUBLISHED, PUBLISHED_SPARSE], ids=["31B", "26B-A4B"])
def test_published_sizes_are_counted_as_transformers_builds_them(text: dict[str, Any]) -> None:
    config = {"model_type": "gemma4", "text_config": text, "vision_config": PUBLISHED_SEEN}
    parts = take_apart(config)
    with torch.device("meta"):
        model = gemma4.Gemma4ForConditionalGeneration(transformers.Gemma4Config.from_dict(config))
    modules = modules_of(dict(parts.modules))
    sizes = dict.fromkeys(modules, 0)
    for name, weight in model.named_parameters():
        sizes[owner_of(parts, name)] += weight.numel()
    assert sizes == {name: module.num_parameters for name, module in modules.items()}


@cache
def limited(most: int) -> Module:
    tower = take_apart(
        {"model_type": "gemma4", "vision_config": {"num_hidden_layers": 1, "max_soft_tokens": most}}
    ).modules[VISION]
    return module_from_config(
        tower.config, name=VISION, modality=VISION, projector=tower.projector, llm_width=8
    )


@given(height=st.integers(1, 9000), width=st.integers(1, 9000), most=st.sampled_from([70, 280, 1120]))
def test_images_are_as_large_as_the_processor_makes_them(height: int, width: int, most: int) -> None:
    """Or refused where it refuses them."""
    try:
        made = get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
    except ValueError:
        made = (0, 0)
    num = made[0] * made[1] // 16**2
    if num == 0:
        with pytest.raises(ValueError, match=f"image of {height} x {width} px: want 1 to {most} soft tokens"):
            image_tokens(limited(most), height, width)
        return
    assert image_tokens(limited(most), height, width) == (num, num // 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_clipped_linears": True}, "use_clipped_linears must be false: products between bounds"),
        ({"head_dim": 6}, "want a head_dim that is a multiple of 4, got 6; nearest: 8"),
    ],
)
def test_towers_that_cannot_run_are_refused(change: dict[str, Any], words: str) -> None:
    config = {"model_type": "gemma4_vision", **GEMMA4_SEEN, **change}
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="v", modality=VISION, llm_width=48))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"audio_config": {}}, "audio_config must be null: a tower for sound"),
        ({"vision_config": None}, "vision_config must be an object, got none; plan its text_config alone"),
    ],
)
def test_other_parts_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        take_apart(CONFIGS["gemma4"] | change)


def test_images_longer_than_the_tables_of_positions_are_refused() -> None:
    graph, sample = whole(), Sample(0, (Segment(VISION, 0, 28, 7, (2, 14)), Segment(TEXT, 0, 5, 5)))
    cuts = {module.name: (len(module.layers),) for module in graph.modules}
    plan = disjoint_plan(graph, (sample,), cuts)
    with pytest.raises(ValueError, match="takes up to 12 patches along a side of an image, got 14"):
        reference_step(plan, seed=0, dtype=F64, source=SyntheticSource(0))


def test_a_tower_does_not_share_tokens_over_ranks() -> None:
    graph = whole()
    cuts = {module.name: (len(module.layers),) for module in graph.modules}
    plan = disjoint_plan(graph, images_and_texts()[:2], cuts, grids={VISION: (2, 1)})
    with pytest.raises(ValueError, match="gemma4_vision does not share tokens over ranks; want cp 1, got 2"):
        build_stage_module(plan, plan.stages[0], seed=0, dtype=F64)


@pytest.mark.parametrize("projector", ["mlp", "linear"])
def test_a_users_tower(projector: str) -> None:
    """Images of any size, as they are, before a language model of another family."""
    torch.manual_seed(5)
    config = transformers.Gemma4VisionConfig(**GEMMA4_SEEN)
    tower: Any = gemma4.Gemma4VisionModel(config)
    for norm in {type(each) for each in tower.modules() if type(each).__name__.endswith("RMSNorm")}:
        widen_norms(tower, norm)
    vision = {"vision": ModalityModule(tower.double(), projector)}
    first, *others = images()
    given_images = {"input_ids": ids(), "pixel_values": [first, others, None]}
    model = MultimodalModule(vision, user_models.llama(), token_ids={"vision": VISION_ID})
    assert_parity(model, spec_of(num_microbatches=3), given_images, ranks=Ranks.EMULATED)
