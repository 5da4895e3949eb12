"""GPUs in proportion to work: nearest, fastest, and stable over random batches."""

import random
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workbench.balance.orchestration.allocation import (
    num_trials,
    proportional_allocation,
    stable_batch_size,
)

cases = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 6))


def all_allocations(num_modules: int, num_units: int):
    return [a for a in product(range(1, num_units + 1), repeat=num_modules) if sum(a) == num_units]


@given(cases)
@example(([1, 5, 7], 4))
def test_nearest_allocation_is_nearest(case: tuple[list[int], int]):
    work, extra = case
    num_units = len(work) + extra
    found = proportional_allocation(work, num_units)
    exact = [w * num_units / sum(work) for w in work]

    def distance(allocation: tuple[int, ...]) -> float:
        return sum(abs(a - e) for a, e in zip(allocation, exact, strict=True))

    assert sum(found) == num_units
    assert min(found) >= 1
    assert distance(found) <= min(map(distance, all_allocations(len(work), num_units))) + 1e-9


@pytest.mark.parametrize(
    ("work", "num_units", "expected"),
    [
        pytest.param([1, 0.98], 2, (1, 1), id="paper-0.98"),
        pytest.param([1, 1.12], 2, (1, 1), id="paper-1.12"),
        pytest.param([2.43, 1], 16, (11, 5), id="llava-mean-ratio"),
        pytest.param([1.27, 1], 16, (9, 7), id="synthchartnet-mean-ratio"),
        pytest.param([1000, 1, 1], 4, (2, 1, 1), id="at-least-one"),
    ],
)
def test_known_allocations(work: list[float], num_units: int, expected: tuple[int, ...]):
    assert proportional_allocation(work, num_units) == expected


def test_number_of_trials_of_the_paper():
    assert num_trials(0.95, 0.05) == 59


def test_batch_size_doubles_until_the_allocation_is_stable():
    rng = random.Random(0)

    def draw(num_samples: int) -> tuple[float, float]:
        return sum(rng.lognormvariate(0, 1) for _ in range(num_samples)), float(num_samples)

    found = stable_batch_size(draw, 8)
    assert [trials.num_samples for trials in found] == [4 * 2**i for i in range(len(found))]
    assert [trials.is_stable for trials in found] == [False] * (len(found) - 1) + [True]
    assert all(sum(times for _, times in trials.counts) == 60 for trials in found)


def test_a_ratio_on_the_edge_never_settles():
    rng = random.Random(0)
    with pytest.raises(ValueError, match=r"no stable allocation up to 64 .*\[4, 4\]"):
        stable_batch_size(lambda n: (9 + rng.random() / n - 0.5 / n, 7), 8, most=64)


@pytest.mark.parametrize(("work", "num_units"), [([], 1), ([-1, 2], 3), ([0, 0], 3), ([1, 1, 1], 2)])
def test_bad_input_is_named(work: list[float], num_units: int):
    with pytest.raises(ValueError, match=r"work of modules|one unit per module"):
        proportional_allocation(work, num_units)
