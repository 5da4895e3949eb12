"""Bounds of other objectives than a step: no plan of strategies or of a listed space is below."""

import random
from dataclasses import replace

import pytest

from experiments.search.compared import judge_of
from experiments.search.spaces import spaces
from sim.predict import IterationJudge
from tests.test_search_goodput import job, losing, made, priced
from tests.test_strategies import cost
from workbench.search.joint.choice import build
from workbench.search.joint.objective_bounds import bound_for
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions
from workbench.search.objectives.step_times import Over
from workbench.strategies.registry import PLANNERS

STRATEGIES = ("cornstarch", "fsdp", "megatron-homogeneous")
BATCHES = (job().batch, job().batch[::-1])


def least_value(on, judge):
    """The bound, and the least value of some strategies' plans."""
    values = []
    for name in STRATEGIES:
        plan = PLANNERS[name](on, cost(), lambda *_: None)
        values.append(judge.value(plan))
    return bound_for(judge)(on, cost(), None), min(values)


@pytest.mark.parametrize(
    ("objective", "said", "batches"),
    [
        (Objective.DOLLARS, ObjectiveOptions(), ()),
        (Objective.TRAINING, ObjectiveOptions(steps=1000), ()),
        (Objective.THROUGHPUT, ObjectiveOptions(), ()),
        (Objective.ITERATION, ObjectiveOptions(batches=2), BATCHES),
        (Objective.DOLLARS, ObjectiveOptions(batches=2, over=Over.WORST), BATCHES),
        (Objective.GOODPUT, ObjectiveOptions(mtbf="2h", repair="1h"), ()),
        (Objective.GOODPUT, ObjectiveOptions(mtbf="10m", repair="5m", batches=2), BATCHES),
    ],
)
def test_no_strategys_plan_is_below(objective, said, batches):
    on = priced()
    bound, value = least_value(on, judge_of(on, cost(), objective, said, batches))
    assert 0 < bound <= value


def test_fewer_nodes_are_no_way_around_it():
    """Over a slow network, where a plan is faster on fewer nodes than on all."""
    on, judge = losing(1e-4, "2h", "10m")
    bound, value = least_value(on, judge)
    assert 0 < bound <= value
    step_s = judge.times(made("cornstarch"), None).step_s
    assert bound < step_s / len(on.batch)


def test_plans_of_a_space_that_leave_ranks_idle_are_not_below():
    """Dollars are of the ranks that a plan uses: the bound holds on any number of them."""
    space = spaces()[1]
    on = replace(space.job, dollars_per_rank_hour=3.6)
    judge = judge_of(on, space.cost, Objective.DOLLARS, ObjectiveOptions(), ())
    bound = bound_for(judge)(on, space.cost, None)
    choices = random.Random(2).sample(list(space.choices()), 24)
    plans = [build(on, choice, space.cost) for choice in choices]
    assert len({len(plan.ranks) for plan in plans}) > 1
    dollars = [0.001 * len(p.ranks) * IterationJudge(space.cost).value(p) / len(p.batch) for p in plans]
    assert dollars == pytest.approx(list(map(judge.value, plans)))
    assert 0.3 * min(dollars) < bound <= min(dollars)
