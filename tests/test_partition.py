"""The partition has the smallest bottleneck, then the most even stages; errors name what is needed."""

from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import all_partitions
from workbench.balance.stages.partition import (
    bottleneck_s,
    partition,
    partition_as_printed,
    partition_min_stages,
)

COSTS = st.lists(st.one_of(st.floats(0, 10), st.integers(0, 4)), min_size=1, max_size=9)


def stage_costs(cost_s, cuts):
    prefix = [0, *accumulate(map(Fraction, cost_s))]
    return [prefix[end] - prefix[first] for first, end in cuts]


@st.composite
def problems(draw):
    cost_s = draw(COSTS)
    return cost_s, draw(st.integers(1, len(cost_s)))


@given(problems())
def test_smallest_bottleneck_then_most_even_of_all_partitions(problem):
    cost_s, num_stages = problem
    choices = list(all_partitions(len(cost_s), num_stages))
    ours = partition(cost_s, num_stages)
    assert ours in choices
    best = min(max(stage_costs(cost_s, cuts)) for cuts in choices)
    assert max(stage_costs(cost_s, ours)) == best
    assert bottleneck_s(cost_s, num_stages) == float(best)
    evenness = [
        sum(cost**2 for cost in stage_costs(cost_s, cuts))
        for cuts in choices
        if max(stage_costs(cost_s, cuts)) == best
    ]
    assert sum(cost**2 for cost in stage_costs(cost_s, ours)) <= min(evenness) * (1 + Fraction(1, 10**12))


@given(COSTS, st.data())
def test_the_papers_programme_has_the_same_bottleneck(cost_s, data):
    num_stages = data.draw(st.integers(1, len(cost_s)))
    printed = partition_as_printed(cost_s, num_stages)
    assert printed in set(all_partitions(len(cost_s), num_stages))
    assert float(max(stage_costs(cost_s, printed))) == bottleneck_s(cost_s, num_stages)


@given(st.lists(st.floats(0, 1), min_size=40, max_size=120), st.integers(1, 40))
def test_the_two_methods_agree_on_long_chains(cost_s, num_stages):
    printed = max(stage_costs(cost_s, partition_as_printed(cost_s, num_stages)))
    assert max(stage_costs(cost_s, partition(cost_s, num_stages))) == printed


@given(COSTS, st.floats(0.1, 30))
def test_fewest_stages_under_a_target(cost_s, target_s):
    if max(cost_s) > target_s:
        with pytest.raises(ValueError, match=r"layer \d+ alone costs"):
            partition_min_stages(cost_s, target_s)
        return
    ours = partition_min_stages(cost_s, target_s)
    counts = [
        num_stages
        for num_stages in range(1, len(cost_s) + 1)
        for cuts in all_partitions(len(cost_s), num_stages)
        if max(stage_costs(cost_s, cuts)) <= target_s
    ]
    assert len(ours) == min(counts)
    assert max(stage_costs(cost_s, ours)) <= target_s


@pytest.mark.parametrize(
    ("cost_s", "num_stages", "expected"),
    [
        pytest.param([1, 1, 1, 1], 2, ((0, 2), (2, 4)), id="even"),
        pytest.param([5, 1, 1, 1], 2, ((0, 1), (1, 4)), id="heavy-first"),
        pytest.param([9, 1, 1, 1, 1], 3, ((0, 1), (1, 3), (3, 5)), id="evened-behind-the-bottleneck"),
        pytest.param([0, 0, 0], 3, ((0, 1), (1, 2), (2, 3)), id="no-cost"),
    ],
)
def test_known_partitions(cost_s, num_stages, expected):
    assert partition(cost_s, num_stages) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: partition([1.0, 1.0], 3), "3 stages out of 2 layers", id="more-stages"),
        pytest.param(lambda: partition_as_printed([1.0], 2), "2 stages out of 1 layers", id="printed"),
        pytest.param(lambda: partition([1.0], 0), "num_stages must be >= 1, got 0", id="no-stages"),
        pytest.param(lambda: partition([], 1), "at least one layer", id="no-layers"),
        pytest.param(lambda: partition([1.0, -2.0], 1), "layer 1: cost .* got -2.0", id="negative"),
        pytest.param(lambda: partition([float("nan")], 1), "layer 0: cost .* got nan", id="nan"),
        pytest.param(lambda: partition_min_stages([1.0, 4.0], 3.0), "layer 1 alone costs 4.0 s", id="target"),
    ],
)
def test_errors_name_what_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call()
