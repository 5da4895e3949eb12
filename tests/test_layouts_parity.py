"""Modules with layouts of their own, on disjoint ranks or on the same, train as one process does."""

import pytest

from runtime.pool import Pool
from tests.layout_jobs import Degrees, planned, three_phase, vision_language
from tests.test_parity import assert_same
from tests.tiny_valm import tiny_valm
from workbench.plan.plan import Precision
from workbench.schedule.choice import Schedule

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
