"""Candidates over several batches are passed over as soon as it is known, or likely, what they come to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.judge import executors_of
from tests.test_next_batches import batch_of, job_of
from tests.test_strategies import cost
from workbench.explain.timeline import Timeline
from workbench.plan.plan import Plan
from workbench.search.joint import drive
from workbench.search.joint.bounds import no_bound
from workbench.search.joint.drive import joint_search
from workbench.search.joint.result import SearchResult
from workbench.search.joint.terms import Scope, Stop
from workbench.search.objectives.money import TrainingDollars
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions, judge_for
from workbench.search.objectives.plan_judge import Judged, Measure, PlanJudge, rank_seconds, step_seconds
from workbench.search.objectives.race import Race, race_of
from workbench.search.objectives.step_times import (
    Over,
    OverBatches,
    PassedOverError,
    Planning,
    summary,
)
from workbench.strategies.registry import PLANNERS

PRICED = replace(job_of(0), dollars_per_rank_hour=2.0)
MEASURES = (step_seconds, rank_seconds, TrainingDollars(job=PRICED, num_steps=10))
steps = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)
PASSED_OVER = str(PassedOverError())


def still() -> float:
    """A clock of planning that takes no time."""
    return 0.0


@cache
def plan() -> Plan:
    return PLANNERS["cornstarch"](job_of(0), cost(), lambda *_: None)


def judge_of(
    steps_s: list[float], over: Over, measure: Measure = step_seconds
) -> tuple[PlanJudge, Iterator[float]]:
    """A judge whose steps are these, one after the other, and what is left of them."""
    left = iter(steps_s)
    times = OverBatches(
        batches=[plan().batch] * len(steps_s),
        replan=lambda plan, batch, schedule: plan,
        seconds=lambda lowered: next(left),
        over=over,
        planning=Planning.HIDDEN,
        clock=still,
    )
    return PlanJudge(times=times, measure=measure, timeline=lambda plan: None, asked={}), left


@given(steps, st.floats(0.1, 2), st.sampled_from(Over), st.sampled_from(MEASURES))
def test_what_is_passed_over_is_not_below_the_limit_and_no_batch_too_late(steps_s, share, over, measure):
    """Held against its value by all batches: as soon as the others could be nothing and it were so."""
    value = judge_of(steps_s, over, measure)[0].value(plan())
    limit = share * value
    judge, left = judge_of(steps_s, over, measure)
    per_s = value / summary(steps_s, over)
    nothing = [[*steps_s[:k], *[0.0] * (len(steps_s) - k)] for k in range(1, len(steps_s))]
    at_least = [per_s * summary(each, over) for each in nothing]
    try:
        found = judge.within(plan(), limit).value
    except PassedOverError:
        assert value >= limit * (1 - 1e-12)
        looked = len(steps_s) - len(list(left))
        assert at_least[looked - 1] >= limit * (1 - 1e-12)
        assert all(each < limit * (1 + 1e-12) for each in at_least[: looked - 1])
    else:
        assert found == value
        assert all(each < limit * (1 + 1e-12) for each in at_least)


def test_of_the_worst_one_batch_tells():
    judge, left = judge_of([3.0, 1.0, 1.0, 1.0], Over.WORST)
    with pytest.raises(PassedOverError):
        judge.within(plan(), 2.9)
    assert list(left) == [1.0, 1.0, 1.0]


def test_a_training_that_misses_its_deadline_is_not_looked_at_to_the_end():
    training = TrainingDollars(job=PRICED, num_steps=10, deadline_s=20.0)
    judge, left = judge_of([5.0, 4.0, 4.0, 4.0], Over.MEAN, training)
    with pytest.raises(PassedOverError):
        judge.within(plan(), 1e9)
    assert list(left) == [4.0, 4.0]


@given(
    st.lists(st.floats(-2, 2), min_size=2, max_size=6),
    st.lists(st.floats(-2, 2), min_size=2, max_size=6),
    st.floats(-2, 2),
)
def test_plans_that_differ_alike_on_all_batches_tell_an_unseen_step(plans, batches, own):
    race = race_of([[exp(each + batch) for batch in batches] for each in plans])
    assert race is not None
    assert race.spread == pytest.approx(0.0, abs=1e-12)
    for seen in range(1, len(batches)):
        foretold = race.others_s([exp(own + batch) for batch in batches[:seen]])
        assert foretold == pytest.approx([exp(own + batch) for batch in batches[seen:]])


def test_the_margin_is_two_standard_deviations_of_what_is_foretold():
    race = Race((0.0, 0.0, 0.0), spread=0.1)
    assert race.others_s([1.0]) == pytest.approx([exp(-0.2 * 2**0.5)] * 2)
    assert race.others_s([1.0, 1.0]) == pytest.approx([exp(-0.2 * 1.5**0.5)])
    assert race_of([[1.0, 2.0]]) is None
    assert race_of([[1.0], [2.0]]) is None
    table = [[1.0, exp(0.1)], [exp(0.1), 1.0]]
    found = race_of(table)
    assert found is not None
    assert (found.shares, found.spread) == (pytest.approx((0.0, 0.0)), pytest.approx(0.1))


def test_a_plan_that_is_likely_too_long_is_passed_over_by_one_batch():
    """Twice as long as those that are held, on a batch that is as long as the others for all of them."""
    race = race_of([[1.0, 1.01, 0.99], [1.1, 1.1, 1.1]])
    judge, left = judge_of([2.0, 2.0, 2.0], Over.MEAN)
    with pytest.raises(PassedOverError):
        judge.within(plan(), 1.5, race)
    assert list(left) == [2.0, 2.0]
    judge, left = judge_of([1.0, 1.0, 1.0], Over.MEAN)
    assert judge.within(plan(), 1.5, race).value == 1.0


@dataclass(frozen=True)
class Held:
    """A judge that holds what it passes over against its value."""

    judge: PlanJudge
    passed: list[tuple[float, float]]

    def value(self, plan: Plan) -> float:
        return self.judge.value(plan)

    def timeline(self, plan: Plan) -> Timeline:
        return self.judge.timeline(plan)

    def within(self, plan: Plan, limit: float, race: Race | None) -> Judged:
        try:
            return self.judge.within(plan, limit, race)
        except PassedOverError:
            self.passed.append((self.judge.value(plan), limit))
            raise


def searched(held: bool = False, workers: int = 1, over: Over = Over.MEAN) -> tuple[SearchResult, Held]:
    job = replace(job_of(0, replicas=1), max_ranks=6)
    batches = [batch_of(seed) for seed in (1, 2, 3)]
    executors = replace(executors_of(cost()), clock=still)
    asked = ObjectiveOptions(batches=3, over=over)
    judge = judge_for(Objective.ITERATION, asked, job, cost(), batches=batches, seed=0, executors=executors)
    holding = Held(judge, [])
    names = ("cornstarch", "entrain", "entrain-search", "disttrain", "megatron-colocated", "fsdp", "hsdp")
    found = joint_search(
        job,
        cost(),
        holding if held else judge,
        stop=Stop(candidates=24),
        scope=Scope(planners={name: PLANNERS[name] for name in names}, lower=no_bound),
        workers=workers,
    )
    return found, holding


@pytest.mark.parametrize("over", Over)
def test_without_a_race_no_candidate_is_passed_over_that_may_be_held(monkeypatch, over):
    monkeypatch.setattr(drive, "race_of", lambda batches_s: None)
    _, holding = searched(held=True, over=over)
    assert holding.passed
    assert all(value >= limit for value, limit in holding.passed)


def test_a_race_is_no_worse_than_starts_and_the_same_whatever_the_workers():
    here, _ = searched()
    passed = [entry for entry in here.log if entry.refusal == PASSED_OVER]
    assert passed
    assert here.value <= min(each.value for each in here.starts if each.value is not None)
    there, _ = searched(workers=2)
    assert (there.log, there.value, there.plan) == (here.log, here.value, here.plan)
