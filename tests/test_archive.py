"""The front of all candidates of a search: of each that was judged, one like it or better is kept."""

from dataclasses import dataclass, field, replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import IterationJudge, predict
from tests.test_joint_search import FEW, small
from tests.test_search_goodput import judge
from tests.test_strategies import cost
from workbench.metrics import step_metrics
from workbench.search.joint.choice import NAME
from workbench.search.joint.drive import joint_search
from workbench.search.joint.terms import Scope, Stop
from workbench.search.objectives.archive import MOST, SHARE, Archive
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.pareto import Point, front
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

ROUNDING = 1 + 1e-9  # of logarithms
a_cost = st.floats(1e-3, 1e12)
some_costs = st.lists(st.tuples(a_cost, a_cost, st.integers(1, 10_000).map(float)), max_size=60)


@given(some_costs, st.sampled_from([1, 5, 1000]))
def test_one_is_kept_that_costs_little_more_in_everything(costs, most):
    archive: Archive[tuple[float, ...]] = Archive(most=most)
    for each in costs:
        archive.add(each, each)
    kept = list(archive)
    assert len(kept) <= most
    assert kept == sorted(kept)
    assert set(kept) <= set(costs)
    shares = [SHARE]
    while shares[-1] < archive.share:
        shares.append(2 * shares[-1])
    little = ROUNDING * prod(1 + share for share in shares)
    for each in costs:
        assert any(all(own <= little * other for own, other in zip(k, each, strict=True)) for k in kept)


@given(some_costs)
def test_nothing_is_kept_that_another_beats_by_much(costs):
    archive: Archive[tuple[float, ...]] = Archive(most=1000)
    for each in costs:
        archive.add(each, each)
    for each in archive:
        assert not any(
            all(own * (1 + SHARE) * ROUNDING < old for own, old in zip(c, each, strict=True)) for c in costs
        )


@dataclass
class Recording:
    """A judge that keeps every plan that it took."""

    plans: list = field(default_factory=list)

    def value(self, plan):
        found = IterationJudge(cost()).value(plan)
        self.plans.append(plan)
        return found

    def timeline(self, plan):
        return IterationJudge(cost()).timeline(plan)


def searched(value_of, *, candidates=60, workers=1, job=None, keeps_front=True):
    planners = {name: PLANNERS[name] for name in FEW}
    scope = Scope(planners=planners, keeps_front=keeps_front)
    stop = Stop(candidates=candidates)
    return joint_search(job or small(), cost(), value_of, stop=stop, scope=scope, workers=workers)


def point(plan, job=None):
    trace = predict(*accept(plan), cost())
    per_hour = None if job is None else job.dollars_per_hour(plan.ranks)
    return Point(
        name="",
        time_s=trace.iteration_s,
        memory_bytes=step_metrics(trace).peak_bytes,
        gpus=len(plan.ranks),
        dollars=None if per_hour is None else per_hour / 3600 * trace.iteration_s,
    )


def test_of_every_candidate_of_a_search_one_like_it_or_better_is_kept():
    """Held against each plan that the judge took, simulated with its memory by the other engine."""
    value_of = Recording()
    found = searched(value_of)
    judged = [point(plan) for plan in value_of.plans if plan.strategy == NAME]
    assert len(judged) >= found.candidates == 60
    assert 0 < len(found.front) <= MOST
    kept = [point(plan) for plan in (found.plan, *(p for _, p in (*found.runners_up, *found.front)))]
    for each in judged:
        limits = [(1 + SHARE) * ROUNDING * own for own in each.costs]
        assert any(all(own <= most for own, most in zip(k.costs, limits, strict=True)) for k in kept)
    held = [point(plan) for plan in (found.plan, *(plan for _, plan in found.runners_up))]
    both = [*held, *(point(plan) for _, plan in found.front)]
    assert any(place >= len(held) for place in front(both)), "what is held is not all of the front"


@pytest.mark.parametrize("objective", [None, Objective.DOLLARS])
def test_the_same_front_whatever_the_workers_and_none_unasked(objective):
    job = replace(small(), dollars_per_rank_hour=3.6)
    value_of = IterationJudge(cost()) if objective is None else judge(objective, job)
    one, two = (searched(value_of, workers=workers, job=job, candidates=30) for workers in (1, 2))
    assert one.front == two.front != ()
    without = searched(value_of, job=job, candidates=30, keeps_front=False)
    assert without.front == ()
    assert (without.log, without.plan) == (one.log, one.plan)
    by_index = {entry.index: entry for entry in one.log}
    for index, plan in one.front:
        assert value_of.value(plan) == by_index[index].value
    times_s = [point(plan, job).time_s for _, plan in one.front]
    assert times_s == sorted(times_s)
