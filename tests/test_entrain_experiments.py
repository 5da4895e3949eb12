"""Entrain's experiments: what they compute besides running."""

from types import SimpleNamespace
from typing import Any

import pytest

from experiments.entrain import executed
from experiments.entrain.intervals import bootstrap
from workbench.cost.profile import ideal_profile


def test_an_interval_holds_the_mean_and_narrows_with_more_values():
    few, many = bootstrap([1.0, 1.2] * 5), bootstrap([1.0, 1.2] * 200)
    for found in (few, many):
        assert found.mean == pytest.approx(1.1)
        assert found.low < found.mean < found.high
    assert many.high - many.low < few.high - few.low
    assert bootstrap([2.0, 2.0]) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match=">= 2 values, got 1"):
        bootstrap([1.0])


def test_executed_plans_do_the_same_work_in_other_orders():
    every = executed.cases(ideal_profile(), executed.UNMEASURED)
    samples = [
        sorted(item.sample for m in case.plan.microbatches_of["llm", 0] for item in m.items) for case in every
    ]
    assert samples == [list(range(executed.NUM_SAMPLES))] * (executed.ORDERS + 2)
    assert len({case.plan.microbatches for case in every}) == len(every)


def test_ratios_are_taken_within_a_round_against_the_mean_of_the_orders():
    predicted: list[Any] = [
        SimpleNamespace(
            case=SimpleNamespace(name=name), plan_hash=name, simulated=SimpleNamespace(iteration_s=seconds)
        )
        for name, seconds in (("random 1", 3.0), ("random 2", 5.0), ("entrain", 2.0))
    ]
    rounds = {"random 1": [3.0, 30.0], "random 2": [5.0, 50.0], "entrain": [2.0, 20.0]}
    result = executed.summary(predicted, rounds)
    row = result["plans"]["entrain"]
    assert row["predicted_speedup"] == row["executed_speedup"] == 2.0
    assert result["entrain_is_faster"]
    slower = executed.summary(predicted, rounds | {"entrain": [4.0, 40.0]})
    assert not slower["entrain_is_faster"]
    assert any("FAILS" in line for line in executed.lines(slower))
