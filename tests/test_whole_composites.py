"""Composites as wholes: gradients are transformers', and layouts train as one process does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from tests.composite_gradients import assert_same_gradients, gradients_of_both
from tests.encoder_cases import widen_vision_rotations
from tests.plans import disjoint_plan, finish
from tests.test_composites_weights import plan_of
from tests.test_parity import assert_same
from workbench.data.sample import Sample, Segment
from workbench.masks.patterns import CAUSAL
from workbench.model.composites.composite import AUDIO, LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.plan import ModuleSettings, Plan, Recompute
from workbench.plan.stage import Stage


class Whole(NamedTuple):
    """What is trained, and how.

    Args:
        batch: of two to four samples; the first two have items.
        shares_tokens: whether context-parallel ranks can share the encoder's tokens.
        is_hybrid: whether ranks cannot share the language model's.
    """

    batch: tuple[Sample, ...]
    shares_tokens: bool = False
    is_hybrid: bool = False


def batch_of(items: Sequence[Segment], mask: str = CAUSAL) -> tuple[Sample, ...]:
    """Two items in a sample, one in the next, none in the last; `items` are three."""
    first, second, third = items
    said = Segment(TEXT, 0, 5, 5)
    return (
        Sample(0, (said, first, replace(second, k=1)), mask),
        Sample(1, (third, said), mask),
        Sample(2, (Segment(TEXT, 0, 9, 9),)),
    )


ONE_SIZE = [Segment(VISION, 0, 16, 16)] * 3
BESIDE_A_CLASS = [Segment(VISION, 0, 17, 16)] * 3
ONE_SIZE_MERGED = [Segment(VISION, 0, 16, 4)] * 3
SQUARES = [Segment(VISION, 0, *size) for size in ((48, 12), (16, 4), (60, 15))]
PATCHES = [Segment(VISION, 0, 24, 24), Segment(VISION, 0, 12, 12, (2, 6)), Segment(VISION, 0, 35, 35)]
SOFT = [Segment(VISION, 0, 24, 6), Segment(VISION, 0, 16, 4, (2, 8)), Segment(VISION, 0, 24, 6, (6, 4))]
HEARD = [Segment(AUDIO, 0, 12, tokens) for tokens in (3, 1, 2)]
WINDOWS = [Segment(AUDIO, 0, *size) for size in ((10, 5), (7, 3), (6, 3))]
LARGE = [Segment(VISION, 0, 6, 6), Segment(VISION, 0, 4, 4, (1, 4)), Segment(VISION, 0, 12, 12, (4, 3))]
TWICE = [Segment(VISION, 0, 64, 4), Segment(VISION, 0, 16, 1), Segment(VISION, 0, 32, 2, (8, 4))]
SAID = Segment(TEXT, 0, 5, 5)
SEEN_AND_HEARD = (
    Sample(0, (SAID, LARGE[0], Segment(AUDIO, 0, 7, 7))),
    Sample(1, (Segment(AUDIO, 0, 3, 3), LARGE[2], SAID)),
    Sample(2, (Segment(TEXT, 0, 9, 9),)),
)
WHOLES = {
    **{
        name: Whole(batch_of(SQUARES), shares_tokens=True)
        for name in ("cosmos3_edge", "cosmos3_edge, biases")
    },
    **{name: Whole(batch_of(SQUARES)) for name in ("cohere_compass", "hyperclovax_vision_v2")},
    "gemma4_unified": Whole(batch_of(LARGE, "gemma"), shares_tokens=True),
    "gemma4_unified, sound": Whole(SEEN_AND_HEARD, shares_tokens=True),
    "minicpm_ocr": Whole(batch_of(SQUARES), shares_tokens=True, is_hybrid=True),
    "minicpm_ocr, merged twice": Whole(batch_of(TWICE), shares_tokens=True),
    "minicpmv4_6": Whole(batch_of(TWICE), is_hybrid=True),
    "minicpmv4_6, last block": Whole(batch_of(TWICE)),
    **{
        name: Whole(batch_of(SQUARES))
        for name in ("exaone4_5", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl", "kimi_k25")
    },
    **{name: Whole(batch_of(SOFT, "gemma4")) for name in ("gemma4", "gemma4, experts")},
    "video_llama_3": Whole(batch_of(PATCHES)),
    "video_llama_3, squares": Whole(batch_of(SQUARES)),
    **{name: Whole(batch_of(BESIDE_A_CLASS), shares_tokens=True) for name in ("video_llava", "vipllava")},
    "ovis2": Whole(batch_of(ONE_SIZE), shares_tokens=True),
    "ovis2, squares": Whole(batch_of(ONE_SIZE_MERGED), shares_tokens=True),
    "janus": Whole(batch_of(ONE_SIZE), shares_tokens=True),
    **{
        name: Whole(batch_of(ONE_SIZE_MERGED), shares_tokens=True)
        for name in ("aya_vision", "cohere2_vision")
    },
    **{name: Whole(batch_of(HEARD)) for name in ("glmasr", "moss_transcribe_diarize")},
    "musicflamingo, fast": Whole(batch_of(WINDOWS), shares_tokens=True),
}
EXPERTS = ("glm4v_moe", "kimi_k25", "gemma4, experts")
FROZEN = ("gemma4_unified, sound", "hyperclovax_vision_v2", "minicpmv4_6", "minicpmv4_6, last block")
TIED = {"model.language_model.embed_tokens.weight", "lm_head.weight"}


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_vision_rotations(monkeypatch)


@pytest.mark.parametrize(
    "name",
    [*WHOLES, "kimi_k25, tied", "janus, untied", "glmasr, grouped", "qianfan_ocr", "llava, several states"],
)
def test_gradients_are_those_of_the_whole_model(name: str, tmp_path: Path, pool: Pool) -> None:
    """Of every weight that a module has, the encoder's and the language model's, on a stage each and two."""
    ours, theirs = gradients_of_both(name, plan_of(name), tmp_path / "whole", pool)
    assert ours.keys() - TIED == theirs.keys() - TIED
    assert_same_gradients(ours, theirs, ours.keys() & theirs.keys())


def whole(name: str) -> ModelGraph:
    """Encoders before their language model."""
    modules = modules_of(dict(take_apart(CONFIGS[name]).modules))
    encoders = (module for called, module in modules.items() if called != LLM)
    return connect("whole", *((encoder, modules[LLM]) for encoder in encoders))


def cuts_of(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Encoders on one stage each, the language model on two."""
    *encoders, llm = graph.modules
    alone = {encoder.name: (len(encoder.layers),) for encoder in encoders}
    return {**alone, llm.name: (2, len(llm.layers) - 2)}


@pytest.mark.parametrize("name", WHOLES)
def test_two_ranks_of_a_tower_and_of_a_language_model_split_tokens(name: str, pool: Pool) -> None:
    """Tensor- and sequence-parallel."""
    graph = whole(name)
    divided = tuple(ModuleSettings(module=module.name, sequence_parallel=True) for module in graph.modules)
    grids = {module.name: (1, 2) for module in graph.modules}
    plan = disjoint_plan(graph, WHOLES[name].batch, cuts_of(graph), grids=grids)
    assert_same(replace(plan, settings=replace(plan.settings, modules=divided)), pool)


@pytest.mark.parametrize("name", WHOLES)
def test_context_parallel_ranks_behind_a_tower(name: str, pool: Pool) -> None:
    """Whose tokens ranks share, too, where they can; one that turns by its places is refused."""
    graph, (batch, shares_tokens, is_hybrid) = whole(name), WHOLES[name]
    shared = {module.name: (2, 1) for module in graph.modules}
    grids = {each: grid for each, grid in shared.items() if (not is_hybrid if each == LLM else shares_tokens)}
    assert_same(disjoint_plan(graph, batch, cuts_of(graph), grids=grids), pool)
    if not shares_tokens:
        plan = disjoint_plan(graph, batch[:2], cuts_of(graph), grids=shared)
        with pytest.raises(ValueError, match="does not share tokens over ranks; want cp 1, got 2"):
            build_stage_module(plan, plan.stages[0], seed=0, dtype=torch.float64)


@pytest.mark.parametrize("name", WHOLES)
def test_replicas_and_stages(name: str, pool: Pool) -> None:
    graph = whole(name)
    in_two = {module.name: (2, len(module.layers) - 2) for module in graph.modules if len(module.layers) > 2}
    plan = disjoint_plan(graph, WHOLES[name].batch[:2], cuts_of(graph) | in_two, replicas=2)
    assert_same(plan, pool)


@pytest.mark.parametrize("trained", [(Trainable.NONE, Trainable.ALL), (Trainable.PROJECTOR, Trainable.NONE)])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parts(name: str, trained: tuple[Trainable, Trainable], pool: Pool) -> None:
    """Encoders; and all but projectors."""
    *encoders, llm = whole(name).modules
    kept = with_trainable(llm, trained[1])
    graph = connect("whole", *((with_trainable(encoder, trained[0]), kept) for encoder in encoders))
    assert_same(disjoint_plan(graph, WHOLES[name].batch, cuts_of(graph)), pool)


def experts_plan(name: str) -> Plan:
    """The tower on a rank of its own, experts on two."""
    graph = whole(name)
    stages = [
        Stage(id=i, module=module.name, replica=0, layers=(0, len(module.layers)), ranks=ranks, ep=ep)
        for i, (module, ranks, ep) in enumerate(zip(graph.modules, (((0,),), ((1, 2),)), (1, 2), strict=True))
    ]
    return finish(graph, WHOLES[name].batch, stages)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_over_two_ranks_behind_a_tower(name: str, pool: Pool) -> None:
    assert_same(experts_plan(name), pool)


def test_experts_over_two_ranks_are_recomputed(pool: Pool) -> None:
    plan = experts_plan("glm4v_moe")
    again = tuple(ModuleSettings(module=m.name, recompute=Recompute.FULL) for m in plan.model.modules)
    assert_same(replace(plan, settings=replace(plan.settings, modules=again)), pool)
