"""Entrain's experiments: what they compute besides running."""

from types import SimpleNamespace
from typing import Any

import pytest

from experiments.entrain import algorithm3, executed, figure4_12, series, table4_3
from experiments.entrain.intervals import bootstrap, ratio_of_medians
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


def test_one_slow_round_does_not_move_a_ratio_of_medians():
    own = [1.0, 1.01, 0.99, 1.0, 1.0] * 6
    slow = [2.0 * seconds for seconds in own[:-1]] + [50.0]
    found = ratio_of_medians([slow, slow], own)
    assert found == pytest.approx((2.0, 2.0, 2.0), rel=0.02)
    noisy = [0.5, 1.5] * 15  # a mean of ratios would say 1.33
    assert ratio_of_medians([noisy], noisy).mean == 1.0
    with pytest.raises(ValueError, match="same >= 2 rounds"):
        ratio_of_medians([[1.0, 2.0]], [1.0])


def test_executed_plans_do_the_same_work_in_other_orders():
    every = executed.cases(ideal_profile(), executed.UNMEASURED)
    samples = [
        sorted(item.sample for m in case.plan.microbatches_of["llm", 0] for item in m.items) for case in every
    ]
    assert samples == [list(range(executed.NUM_SAMPLES))] * (executed.ORDERS + len(executed.PLANNERS))
    by_name = {case.name: case.plan for case in every}
    assert by_name.pop("entrain-in-turn").microbatches == by_name["entrain"].microbatches
    assert len({plan.microbatches for plan in by_name.values()}) == len(by_name)


def test_ratios_are_of_medians_against_the_mean_of_the_orders():
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


def figures(seconds: list[float], spread_s: float) -> dict[str, list[float]]:
    return {
        "seconds": seconds,
        "vision_std_s": [spread_s] * len(seconds),
        "llm_std_s": [spread_s] * len(seconds),
    }


def test_speedups_pair_the_batches_that_both_have_seen():
    methods = {"entrain": figures([2.0, 4.0], 1.0), "slow": figures([4.0, 8.0, 100.0], 3.0)}
    over = figure4_12.speedups(methods, "entrain")
    assert over == {"slow": (2.0, 2.0, 2.0)}


def test_the_largest_reduction_is_taken_over_all_cells():
    even, uneven = figures([1.0, 1.0], 1.0), figures([1.0, 1.0], 4.0)
    every = {"llm": {"a": {"entrain": even, "disttrain": uneven}, "b": {"entrain": even, "disttrain": even}}}
    assert table4_3.largest_reduction(every) == 4.0
    assert table4_3.printed()["vision", "disttrain", "SynthChartNet"] == 208.07


def test_worse_configurations_are_simulated_too():
    every: list[Any] = list(range(20))
    assert algorithm3.spread(every, 6) == (0, 1, 2, 3, 8, 14)
    assert algorithm3.spread(every[:4], 8) == (0, 1, 2, 3)


def test_a_series_that_is_not_there_names_its_command(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(series, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"experiments\.entrain\.series --llm"):
        series.kept_series()
