"""Executors by which objectives judge plans, supplied to the planner from outside; they can be pickled."""

import time
from functools import partial

from sim.failures.goodput import useful_samples_per_s
from sim.predict import step_s, timeline_of
from workbench.cost.model import CostModel
from workbench.search.objectives.options import Executors


def executors_of(cost: CostModel) -> Executors:
    """The simulators at the prices of a cost model, and this machine's clock."""
    return Executors(
        seconds=partial(step_s, cost=cost),
        timeline=partial(timeline_of, cost=cost),
        failures=useful_samples_per_s,
        clock=time.perf_counter,
    )
