"""What judges plans for an objective, from outside the planner; all of it can be sent to other processes."""

import time
from functools import partial

from sim.failures.goodput import useful_samples_per_s
from sim.predict import predict_within, step_s
from workbench.cost.model import CostModel
from workbench.plan.plan import Plan
from workbench.search.objectives.asked import Executors
from workbench.timing.accept import accept
from workbench.trace import Trace


def executors_of(cost: CostModel) -> Executors:
    """The simulators, at the prices of a cost model, and this machine's clock."""
    return Executors(
        seconds=partial(step_s, cost=cost),
        trace=partial(_trace, cost=cost),
        failures=useful_samples_per_s,
        clock=time.perf_counter,
    )


def _trace(plan: Plan, cost: CostModel) -> Trace:
    return predict_within(*accept(plan), cost)
