"""Bounds on token distributions: random ones against many draws, the others against closed forms."""

from itertools import product
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench.token_bounds import least_possible, random_bound, random_tail
from tests.examples import examples
from tests.token_oracle import (
    graham_additive,
    graham_longest_first,
    graham_unsorted,
    loads_of,
    random_variance,
)
from workbench.balance.tokens.policies import max_over_mean, random_blocks

works = st.lists(st.integers(0, 20), min_size=1, max_size=7)


@given(works, st.integers(1, 3))
@examples(30)
def test_variance_over_every_assignment(work, num_ranks):
    every = [loads_of(work, owners, num_ranks)[0] for owners in product(range(num_ranks), repeat=len(work))]
    assert random_variance(work, num_ranks) == pytest.approx(np.var(every), abs=1e-9)


@given(works, st.integers(1, 3), st.floats(1, 3))
@examples(30)
def test_tail_over_every_assignment(work, num_ranks, ratio):
    """The share of all assignments that reach the ratio is at most Chernoff's."""
    limit = ratio * sum(work) / num_ranks
    every = [
        max(loads_of(work, owners, num_ranks)) >= limit
        for owners in product(range(num_ranks), repeat=len(work))
    ]
    if sum(work):
        assert np.mean(every) <= random_tail(work, num_ranks, ratio) + 1e-12


def test_tail_is_the_printed_formula():
    """Four blocks of 2 on 2 ranks, mean 4, d = 0.5: 2 (e**0.5 / 1.5**1.5)**(4 / 2), above 1; d = 1 below."""
    assert random_tail([2] * 4, 2, 1.5) == 1.0
    assert random_tail([2] * 40, 2, 2.0) == pytest.approx(2 * (exp(1) / 4) ** 20)


def test_bound_is_where_the_tail_is_the_probability():
    work = list(range(1, 513))
    bound = random_bound(work, 8, failure_probability=0.01)
    assert 1.2 < bound < 2
    assert random_tail(work, 8, bound) == pytest.approx(0.01)


def test_draws_keep_the_bound_and_the_variance():
    work = np.arange(1, 513)
    draws = [random_blocks(work, 8, seed=seed) for seed in range(300)]
    bound = random_bound(work, 8, failure_probability=0.01)
    assert np.mean([max_over_mean(work, owners, 8) > bound for owners in draws]) <= 0.01
    loads = [work[owners == 0].sum() for owners in draws]
    assert np.var(loads) == pytest.approx(random_variance(work, 8), rel=0.25)


def test_more_blocks_make_random_more_even():
    """The paper's T >> G**2."""
    bounds = [random_bound([1] * n, 8, failure_probability=0.01) for n in (128, 1024, 8192)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 1.15


def test_bound_of_few_blocks_is_everything_on_one_rank():
    assert random_bound([1], 4, failure_probability=0.01) == 4.0
    assert random_bound([0, 0], 4, failure_probability=0.01) == 1.0
    assert random_tail([0, 0], 4, 1.5) == 0.0


@pytest.mark.parametrize(
    ("work", "num_ranks", "least"),
    [([3, 3, 3], 2, 6), ([10, 1, 1], 2, 10), ([2, 2, 1], 2, 3), ([0.5, 0.75], 2, 0.75), ([4], 3, 4)],
)
def test_least_possible_knows_three_reasons(work, num_ranks, least):
    assert least_possible(work, num_ranks) == least


def test_graham_factors():
    assert (graham_longest_first(1), graham_unsorted(1)) == (1.0, 1.0)
    assert graham_longest_first(8) == pytest.approx(4 / 3 - 1 / 24)
    assert graham_unsorted(2) == 1.5
    assert graham_additive([4, 2], 2) == 7.0


def test_bad_probabilities_are_refused():
    with pytest.raises(ValueError, match=r"failure_probability must be in \(0, 1\), got 0"):
        random_bound([1], 2, failure_probability=0)
    with pytest.raises(ValueError, match="max_over_mean must be >= 1"):
        random_tail([1], 2, 0.5)
