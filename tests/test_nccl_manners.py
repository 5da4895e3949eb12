"""NCCL's manners over gloo: the runtime bears them, and each is caught by an executor that does not."""

import re
import signal
from collections.abc import Iterable

import pytest

from experiments.nccl.cases import Case, cases, divisions, pipeline, schedules
from experiments.nccl.manners import Manner
from experiments.nccl.ranks import LACKS, Conduct, Doom, Variant
from experiments.nccl.run import HUNG, SAME, SHORT_S, UNNOTICED_S, dead_rank, hangs_of_before, outcome
from runtime.world.pool import Pool
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.schedule.choice import ScheduleKind
from workbench.strategies.registry import PLANNERS, PRICED

TOLD_S = 30.0
NAMES = [*PLANNERS, *PRICED]
KINDS = list(ScheduleKind)
PARTS = ("schedules", "strategies", "divided layers")


@pytest.fixture(scope="module")
def every() -> list[Case]:
    return list(cases())


@pytest.fixture(scope="module")
def two_ranks() -> Plan:
    return pipeline(ScheduleKind.ONE_F_ONE_B, 2)


def assert_twice(found: Iterable[Case], names: Iterable[str]) -> None:
    """Each of the names at two numbers of ranks."""
    there = {case.name for case in found}
    for each in names:
        assert len([name for name in there if re.fullmatch(rf"{each}, \d+ ranks", name)]) == 2, each


def test_every_schedule_is_there_at_two_numbers_of_ranks() -> None:
    assert_twice(schedules(), ScheduleKind)


def test_every_strategy_is_there_at_two_numbers_of_ranks(every: list[Case]) -> None:
    assert_twice(every, NAMES)
    stages = [stage for case in every for stage in case.plan.stages]
    assert {stage.cp for stage in stages} > {1}
    assert {stage.tp for stage in stages} > {1}
    assert {stage.ep for stage in stages} > {1}


@pytest.fixture
def different(part: str, request: pytest.FixtureRequest) -> list[Case]:
    """Of a part; of equal plans the first, and a strategy at its first number of ranks."""
    parts: dict[str, list[Case]] = {part: [] for part in PARTS}
    seen: set[str] = set()
    named: set[str] = set()
    for case in schedules() if part == "schedules" else request.getfixturevalue("every"):
        name = case.name.split(", ")[0]
        part = "schedules" if name in KINDS else "strategies" if name in NAMES else "divided layers"
        if not (part == "strategies" and name in named) and plan_hash(case.plan) not in seen:
            parts[part].append(case)
            seen.add(plan_hash(case.plan))
        named.add(name)
    return parts[part]


@pytest.mark.parametrize("part", PARTS)
def test_all_train_as_one_process(different: list[Case], pool: Pool) -> None:
    """Every schedule twice, every strategy once, and every way to divide a layer; equal plans run once.

    `experiments.bench.nccl_manners` runs all of them.
    """
    assert different
    outcomes = {case.name: outcome(case.plan, pool, Conduct()).what for case in different}
    assert outcomes == dict.fromkeys(outcomes, SAME)


def test_receives_posted_first_and_a_wait_for_the_device_hang(every: list[Case], pool: Pool) -> None:
    found = {case.name: before.what for case, before in hangs_of_before(every, pool)}
    assert found == {"1f1b, 2 ranks": HUNG, "gpipe, 2 ranks": HUNG}


@pytest.mark.parametrize("manner", [Manner.DEVICE_WAIT, Manner.FIRST_USE, Manner.EARLY_FUTURES])
def test_each_manner_alone_is_caught(manner: Manner, two_ranks: Plan, pool: Pool) -> None:
    lacking = Conduct(manners=frozenset({manner}), variant=LACKS[manner])
    assert outcome(two_ranks, pool, lacking, timeout_s=SHORT_S).what != SAME
    built = Conduct(manners=frozenset({manner}))
    assert outcome(two_ranks, pool, built).what == SAME


def test_sums_behind_reduce_scatters_wait_for_them(pool: Pool) -> None:
    """In a side stream, since no pass waits: one that does not wait sums what has not come."""
    plan = next(case.plan for case in divisions() if case.name == "resharded after a step, 2 instances")
    assert outcome(plan, pool, Conduct()).what == SAME
    early = frozenset({Manner.EARLY_FUTURES})
    lacking = Conduct(manners=early, variant=Variant.SUMS_TOO_EARLY)
    assert outcome(plan, pool, lacking).what.startswith("different gradient")


def test_a_stopped_rank_is_named_where_waits_never_end(two_ranks: Plan, pool: Pool) -> None:
    found = dead_rank(two_ranks, pool, signal.SIGSTOP)
    assert "to rank 1: nothing came within 2 s" in found.what or "from rank 1: nothing came" in found.what
    assert found.seconds < TOLD_S
    endless = Conduct(
        manners=frozenset({Manner.ENDLESS_WAITS}),
        variant=Variant.WAITS_FOR_EVER,
        doom=Doom(1, 1, signal.SIGSTOP),
    )
    assert outcome(two_ranks, pool, endless, timeout_s=SHORT_S, job_s=UNNOTICED_S).what == HUNG


def test_a_killed_rank_ends_the_job(two_ranks: Plan, pool: Pool) -> None:
    found = dead_rank(two_ranks, pool, signal.SIGKILL)
    assert found.what.startswith("process 1: killed by SIGKILL")
    assert found.seconds < TOLD_S
