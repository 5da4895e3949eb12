"""Sums of floats are the same on every version of Python, and plans are made with them."""

import builtins
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import predict
from workbench.float_sum import float_sum
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.planner.stage_counts import silent
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

JOB = Path(__file__).parents[1] / "examples" / "valm.yaml"
PRICED_BY = ("workbench.", "sim.")


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=50))
def test_it_is_rounded_at_every_step(values):
    assert float_sum(values) == np.cumsum(values)[-1] or not np.isfinite(np.cumsum(values)[-1])


def test_what_the_built_in_carries_since_3_12_is_lost():
    assert float_sum([1.0, 1e100, 1.0, -1e100]) == 0.0


def test_whole_numbers_stay_whole():
    assert repr(float_sum([2, 3])) == "5"
    assert repr(float_sum([])) == "0"
    assert repr(float_sum([], 0.0)) == "0.0"


@pytest.fixture
def summed(monkeypatch):
    """Modules of the workbench and simulator that added floats by the built-in `sum`."""
    found = set()

    def watched(values, /, start=0):
        total = built_in(values, start)
        module = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(total, float) and module.startswith(PRICED_BY):
            found.add(f"{module}:{sys._getframe(1).f_lineno}")
        return total

    built_in = builtins.sum
    monkeypatch.setattr(builtins, "sum", watched)
    return found


@pytest.mark.parametrize("strategy", PLANNERS)
def test_no_plan_price_or_trace_has_a_built_in_sum_of_floats(strategy, summed):
    job = load_job(JOB)
    cost = cost_of(job, None, None)
    try:
        plan = PLANNERS[strategy](job, cost, silent)
    except ValueError:  # a job that the strategy does not take
        return
    lowered, memory = accept(plan)
    predict(lowered, memory, cost)
    assert summed == set()
