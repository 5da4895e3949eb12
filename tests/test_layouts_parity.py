"""Modules with layouts of their own, on disjoint ranks or on the same, train as one process does."""

import pytest

from runtime.pool import Pool
from tests.plans import cluster
from tests.test_parity import assert_same
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.graph.model_graph import ModelGraph, connect
from workbench.graph.trainable import Trainable
from workbench.job import Job, ModuleLayout
from workbench.plan.plan import Plan, Precision, Settings
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import megatron_heterogeneous

Degrees = tuple[int, ...]  # dp, pp, cp and, where it is not 1, tp
APART = Schedule()


def three_phase(window: int | None = None, run_ahead: int = 0) -> Schedule:
    return Schedule(kind=ScheduleKind.THREE_PHASE, window=window, run_ahead=run_ahead)


def vision_language() -> ModelGraph:
    model = tiny_valm(vision=Trainable.ALL)
    return connect("tiny-vlm", (model.module("vision"), model.module("llm")))


def layout(name: str, degrees: Degrees, schedule: Schedule) -> ModuleLayout:
    dp, pp, cp, tp = (*degrees, 1)[:4]
    offset = None if schedule.kind is not ScheduleKind.THREE_PHASE else 0
    return ModuleLayout(module=name, dp=dp, pp=pp, cp=cp, tp=tp, rank_offset=offset)


def planned(
    model: ModelGraph,
    layouts: dict[str, Degrees],
    *,
    microbatch: int,
    images: tuple[int, ...],
    schedule: Schedule = APART,
) -> Plan:
    clips = tuple(1 - count % 2 for count in images) if "audio" in layouts else (0,) * len(images)
    job = Job(
        name="layouts",
        model=model,
        cluster=cluster(6),
        batch=tiny_batch(images, clips),
        microbatch_samples=microbatch,
        layouts=tuple(layout(name, degrees, schedule) for name, degrees in layouts.items()),
        schedule=schedule,
        settings=Settings(precision=Precision.FLOAT64),
        profile="A40",
    )
    return megatron_heterogeneous.plan(job, CostModel(load_profile("A40")))


PAIRS = [
    pytest.param((2, 1, 1), (1, 2, 1), 2, (1, 2, 0, 1), id="fan-in"),
    pytest.param((1, 2, 1), (2, 2, 1), 1, (1, 2, 0, 1), id="fan-out"),
    pytest.param((3, 1, 1), (2, 1, 1), 2, (1, 2, 0, 1, 1, 0, 2, 1), id="non-divisible-in"),
    pytest.param((2, 1, 1), (3, 1, 1), 1, (1, 2, 0, 1, 1, 0), id="non-divisible-out"),
    pytest.param((3, 1, 1), (1, 1, 2), 1, (1, 2, 1), id="more-replicas-than-samples-in-a-round"),
    pytest.param((1, 1, 2), (2, 1, 2), 1, (1, 2, 0, 1), id="both-context-parallel-fan-out"),
    pytest.param((2, 1, 2), (1, 1, 2), 2, (1, 2, 0, 1), id="both-context-parallel-fan-in"),
]


@pytest.mark.parametrize(("vision", "llm", "microbatch", "images"), PAIRS)
def test_one_encoder(
    vision: Degrees, llm: Degrees, microbatch: int, images: tuple[int, ...], pool: Pool
) -> None:
    plan = planned(vision_language(), {"vision": vision, "llm": llm}, microbatch=microbatch, images=images)
    for module, (dp, pp, cp) in (("vision", vision), ("llm", llm)):
        assert {(len(plan.chain[module, r]), plan.chain[module, r][0].cp) for r in range(dp)} == {(pp, cp)}
    assert_same(plan, pool, Precision.FLOAT64)


def test_two_encoders_with_three_degrees(pool: Pool) -> None:
    layouts = {"vision": (3, 1, 1), "audio": (1, 1, 1), "llm": (2, 1, 1)}
    plan = planned(tiny_valm(), layouts, microbatch=1, images=(1, 2, 0, 1))
    assert len(plan.ranks) == 6
    assert_same(plan, pool, Precision.FLOAT64)


SHARED = [
    pytest.param((4, 1, 1), (2, 2, 1), 1, three_phase(), id="fan-in-before-a-pipeline"),
    pytest.param((4, 1, 1), (2, 2, 1), 1, three_phase(1, 1), id="windows-that-run-ahead"),
    pytest.param((1, 4, 1), (4, 1, 1), 1, three_phase(), id="fan-out-of-a-pipeline"),
    pytest.param((2, 1, 1), (2, 1, 1), 2, three_phase(1), id="equal"),
    pytest.param((3, 2, 1), (2, 3, 1), 1, three_phase(2), id="non-divisible"),
    pytest.param((4, 1, 1), (1, 1, 4), 2, three_phase(), id="context-parallel-llm"),
    pytest.param((1, 1, 2), (2, 1, 1), 1, three_phase(2), id="context-parallel-encoder"),
    pytest.param((4, 1, 1), (1, 2, 1, 2), 2, three_phase(1), id="tensor-parallel-llm"),
    pytest.param((1, 1, 1, 2), (1, 1, 2), 1, three_phase(), id="tensor-to-context"),
]


@pytest.mark.parametrize(("vision", "llm", "microbatch", "schedule"), SHARED)
def test_one_encoder_on_the_same_ranks(
    vision: Degrees, llm: Degrees, microbatch: int, schedule: Schedule, pool: Pool
) -> None:
    layouts = {"vision": vision, "llm": llm}
    images = (1, 2, 0, 1, 1, 0, 2, 1)
    plan = planned(vision_language(), layouts, microbatch=microbatch, images=images, schedule=schedule)
    assert all(len(stages) == 2 for stages in plan.stages_on.values())
    assert_same(plan, pool, Precision.FLOAT64)


def test_two_encoders_on_the_ranks_of_the_llm(pool: Pool) -> None:
    layouts = {"vision": (4, 1, 1), "audio": (2, 1, 2), "llm": (2, 2, 1)}
    plan = planned(tiny_valm(), layouts, microbatch=1, images=(1, 2, 0, 1), schedule=three_phase(1))
    assert len(plan.ranks) == 4
    assert_same(plan, pool, Precision.FLOAT64)
