"""Token distribution: contracts, the authors' algorithms step by step, optimality, bounds, bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as torch_balancer

from experiments.bench.token_bounds import least_possible
from tests import token_oracle as oracle
from tests.examples import examples
from workbench.balance.tokens import policies as tokens
from workbench.balance.tokens.compiled import descending_order
from workbench.balance.tokens.exchange import (
    Swap,
    equal_counts_exchanged,
    exchanged,
    longest_first_exchanged,
)


@pytest.fixture(scope="module", autouse=True)
def compiled_before_deadlines_count():
    longest_first_exchanged([3, 3, 2, 2, 2], 2)


def random_seeded(work, num_ranks):
    return tokens.random_blocks(work, num_ranks, seed=7)


POLICIES = [
    tokens.longest_first,
    tokens.longest_first_unsorted,
    tokens.longest_first_equal_counts,
    tokens.sorted_round_robin,
    tokens.contiguous,
    tokens.zigzag,
    tokens.stripe,
    random_seeded,
    longest_first_exchanged,
    equal_counts_exchanged,
]
EQUAL_COUNTS = [
    tokens.longest_first_equal_counts,
    tokens.sorted_round_robin,
    tokens.contiguous,
    tokens.stripe,
    equal_counts_exchanged,
]

works = st.lists(st.integers(0, 40), min_size=1, max_size=60)
amounts = works | st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
large = st.lists(st.integers(0, 2**40), min_size=1, max_size=40)
ranks = st.integers(1, 9)


@pytest.mark.parametrize("policy", POLICIES)
@given(work=amounts, num_ranks=ranks)
@examples(60)
def test_every_block_has_one_owner_and_equal_input_equal_owners(policy, work, num_ranks):
    given_work = np.array(work)
    before = given_work.copy()
    given_work.setflags(write=False)
    owners = policy(given_work, num_ranks)
    assert (owners.dtype, owners.shape) == (np.int32, (len(work),))
    assert set(owners.tolist()) <= set(range(num_ranks))
    assert np.array_equal(owners, policy(work, num_ranks))
    assert np.array_equal(given_work, before)


@pytest.mark.parametrize("policy", EQUAL_COUNTS)
@given(work=amounts, num_ranks=ranks)
@examples(60)
def test_numbers_of_blocks_differ_by_one_at_most(policy, work, num_ranks):
    counts = np.bincount(policy(work, num_ranks), minlength=num_ranks)
    assert counts.max() - counts.min() <= 1


@given(work=works | large, num_ranks=ranks)
def test_longest_first_is_the_algorithm_of_the_papers(work, num_ranks):
    owners = tokens.longest_first(work, num_ranks)
    assert owners.tolist() == oracle.greedy(work, oracle.heaviest_first(work), num_ranks)


@given(work=works | large, num_ranks=ranks)
def test_the_unsorted_variant_is_algorithm_1_as_printed(work, num_ranks):
    owners = tokens.longest_first_unsorted(work, num_ranks)
    assert owners.tolist() == oracle.greedy(work, range(len(work)), num_ranks)


@given(work=works | large, num_ranks=ranks)
def test_equal_counts_is_longest_first_among_ranks_with_room(work, num_ranks):
    owners = tokens.longest_first_equal_counts(work, num_ranks)
    assert owners.tolist() == oracle.greedy_equal_counts(work, num_ranks)


@given(work=works | large)
def test_radix_order_is_the_stable_descending_order(work):
    assert descending_order(np.array(work)).tolist() == oracle.heaviest_first(work)


def test_radix_order_of_large_numbers_with_equal_low_digits():
    work = np.array([5 << 50, 1, 5 << 50, 3 << 22, (5 << 50) + 1, 3 << 22, 0])
    assert descending_order(work).tolist() == [4, 0, 2, 3, 5, 1, 6]


@given(work=st.lists(st.integers(0, 4096).map(lambda n: n / 64), min_size=1, max_size=40), num_ranks=ranks)
def test_fractions_that_can_be_counted_exactly_are(work, num_ranks):
    """Multiples of 1/64 give the owners that the same work in 64ths gives."""
    whole = [int(w * 64) for w in work]
    for policy in (tokens.longest_first, longest_first_exchanged, tokens.sorted_round_robin):
        assert np.array_equal(policy(work, num_ranks), policy(whole, num_ranks))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(2, 6), st.integers(1, 5))
def test_sorted_round_robin_is_pytorchs(rounds, num_ranks, repeat):
    work = (rounds * num_ranks * repeat)[: len(rounds) * num_ranks]
    groups = torch_balancer._PTRRLoadBalancer.ptrr_scheduling(tensor(work), num_ranks)
    owners = tokens.sorted_round_robin(work, num_ranks)
    assert [np.flatnonzero(owners == rank).tolist() for rank in range(num_ranks)] == groups.tolist()


@given(st.integers(1, 6), st.integers(1, 8))
def test_zigzag_is_pytorchs_head_tail(blocks_of_run, num_ranks):
    num_blocks = 2 * num_ranks * blocks_of_run
    order = torch_balancer._HeadTailLoadBalancer(num_blocks, num_ranks, "cpu")._generate_indices()
    owners = tokens.zigzag([1] * num_blocks, num_ranks)
    ours = np.concatenate([np.flatnonzero(owners == rank) for rank in range(num_ranks)])
    assert ours.tolist() == order[0].tolist()


@pytest.mark.parametrize(
    ("policy", "work", "num_ranks", "expected"),
    [
        # Figure 3a of the ICML paper: 8 blocks, 2 GPUs, 26 tiles.
        (tokens.longest_first, [1, 2, 2, 4, 5, 2, 2, 8], 2, [0, 0, 1, 1, 1, 0, 1, 0]),
        (tokens.longest_first_unsorted, [1, 2, 2, 4, 5, 2, 2, 8], 2, [0, 1, 0, 1, 0, 1, 0, 1]),
        (tokens.contiguous, [1] * 5, 3, [0, 0, 1, 1, 2]),
        (tokens.zigzag, [1] * 8, 2, [0, 0, 1, 1, 1, 1, 0, 0]),
        (tokens.zigzag, [1] * 3, 4, [0, 1, 2]),
        (tokens.stripe, [1] * 5, 2, [0, 1, 0, 1, 0]),
        (tokens.sorted_round_robin, [5, 4, 3, 2, 1], 2, [0, 1, 1, 0, 0]),
        (tokens.longest_first_equal_counts, [9, 1, 1, 1], 2, [0, 1, 1, 0]),
        (tokens.longest_first_equal_counts, [1], 3, [0]),
        (tokens.longest_first, [0, 0, 0], 2, [0, 0, 0]),
        (tokens.longest_first, [-0.0, 2.5, 0.5], 2, [1, 0, 1]),
    ],
)
def test_known_cases(policy, work, num_ranks, expected):
    assert policy(work, num_ranks).tolist() == expected


# Optimality


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_bounds_of_graham_against_brute_force(work, num_ranks):
    least = oracle.least_by_brute_force(work, num_ranks)
    heaviest = {
        policy: max(oracle.loads_of(work, policy(work, num_ranks), num_ranks)) for policy in POLICIES[:2]
    }
    assert least_possible(work, num_ranks) <= least
    assert heaviest[tokens.longest_first] <= oracle.graham_longest_first(num_ranks) * least + 1e-9
    assert heaviest[tokens.longest_first_unsorted] <= oracle.graham_unsorted(num_ranks) * least + 1e-9
    assert max(heaviest.values()) <= oracle.graham_additive(work, num_ranks) + 1e-9


def test_grahams_worst_case_for_two_ranks_is_reached_and_exchanges_repair_it():
    work = [3, 3, 2, 2, 2]
    heaviest = [
        max(oracle.loads_of(work, policy(work, 2), 2))
        for policy in (tokens.longest_first, longest_first_exchanged)
    ]
    assert heaviest == [7, 6]
    assert oracle.graham_longest_first(2) == pytest.approx(7 / 6)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=10), st.integers(2, 3))
@settings(max_examples=25, deadline=None)
def test_against_the_integer_programme(work, num_ranks):
    least = oracle.least_by_milp(work, num_ranks)
    heaviest = [
        max(oracle.loads_of(work, policy(work, num_ranks), num_ranks))
        for policy in (longest_first_exchanged, tokens.longest_first)
    ]
    assert least_possible(work, num_ranks) <= least <= heaviest[0] <= heaviest[1]
    assert heaviest[1] <= oracle.graham_longest_first(num_ranks) * least + 1e-9


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(2, 3))
@settings(max_examples=15, deadline=None)
def test_integer_programme_is_the_brute_force_optimum(work, num_ranks):
    assert oracle.least_by_milp(work, num_ranks) == oracle.least_by_brute_force(work, num_ranks)


@pytest.mark.parametrize("exchange", Swap)
@given(data=st.data(), work=works, num_ranks=st.integers(1, 5))
def test_exchanges_never_hurt_and_end_where_none_helps(exchange, data, work, num_ranks):
    anywhere = st.lists(st.integers(0, num_ranks - 1), min_size=len(work), max_size=len(work))
    start = data.draw(anywhere)
    found = exchanged(work, start, num_ranks, exchange, tolerance=0).tolist()
    heaviest = max(oracle.loads_of(work, found, num_ranks))
    assert heaviest <= max(oracle.loads_of(work, start, num_ranks))
    may_move = exchange is Swap.MOVE_OR_SWAP
    is_even = (heaviest - 1) * num_ranks < sum(work)
    assert is_even or oracle.best_exchange(work, found, num_ranks, may_move=may_move) == heaviest
    if not may_move:
        assert sorted(found) == sorted(start)


@given(data=st.data(), work=works, num_ranks=st.integers(2, 5))
def test_one_step_makes_the_best_exchange_or_one_that_is_even(data, work, num_ranks):
    start = data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(work), max_size=len(work)))
    loads = oracle.loads_of(work, start, num_ranks)
    heavy = loads.index(max(loads))
    found = exchanged(work, start, num_ranks, Swap.MOVE_OR_SWAP, tolerance=0, most_steps=1).tolist()
    changed = {owner for pair in zip(start, found, strict=True) if pair[0] != pair[1] for owner in pair}
    after = oracle.loads_of(work, found, num_ranks)
    if changed:
        best = oracle.best_exchange(work, start, num_ranks, may_move=True)
        assert heavy in changed
        assert max(after[rank] for rank in changed) <= max(best, -(-sum(work) // num_ranks))
    else:
        assert found == start


def test_even_enough_is_left_alone():
    work, start = [100, 1, 98, 1], [0, 0, 1, 1]  # 101 and 99 for a mean of 100
    assert exchanged(work, start, 2, Swap.SWAP, tolerance=0.01).tolist() == start
    assert exchanged(work, start, 2, Swap.MOVE_OR_SWAP, tolerance=0.009).tolist() == [0, 1, 1, 1]


# Costs and what is made of them


def test_the_last_block_may_be_short():
    assert tokens.block_sizes(300, 128).tolist() == [128, 128, 44]
    assert tokens.block_sizes(256, 128).tolist() == [128, 128]


def test_loads_and_imbalance():
    assert tokens.rank_loads([1, 2, 3], [1, 0, 1], 3).tolist() == [2, 4, 0]
    assert tokens.rank_loads([0.5, 0.25], [0, 0], 1).tolist() == [0.75]
    assert tokens.max_over_mean([1, 2, 3], [1, 0, 1], 3) == 2.0
    assert tokens.max_over_mean([0, 0], [0, 0], 2) == 1.0


BAD = [
    ([], 2, "at least one block"),
    ([[1, 2]], 2, "list of at least one block"),
    ([1, 2], 0, "num_ranks must be >= 1, got 0"),
    ([1, -3], 2, r"finite and >= 0 for every block, got -3"),
    ([1.0, float("nan")], 2, "finite and >= 0"),
    ([1.0, float("inf")], 2, "finite and >= 0"),
    ([2**61, 2**61], 2, r"add up to less than 2\*\*62"),
    ([1e308, 1e308], 2, "must have a finite sum"),
    (["a"], 2, "work must be numbers"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("work", "num_ranks", "message"), BAD)
def test_bad_input_is_refused(policy, work, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        policy(work, num_ranks)


def test_sums_that_leave_no_room_for_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"for 512 ranks must add up to less than 2\*\*53"):
        tokens.longest_first([2**53, 1], 512)


@pytest.mark.parametrize(
    ("owners", "message"),
    [([0], "one owner for each of 2"), ([0, 2], r"0\.\.1, got 0\.\.2"), ([0.0, 1.0], "whole numbers")],
)
def test_bad_owners_are_refused(owners, message):
    with pytest.raises(ValueError, match=message):
        tokens.rank_loads([1, 2], owners, 2)
    with pytest.raises(ValueError, match=message):
        exchanged([1, 2], owners, 2, Swap.SWAP)


def test_bad_sizes_and_limits_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        tokens.block_sizes(0, 128)
    with pytest.raises(ValueError, match="most_steps must be >= 0"):
        exchanged([1], [0], 1, Swap.SWAP, most_steps=-1)
    with pytest.raises(ValueError, match="tolerance must be >= 0"):
        exchanged([1], [0], 1, Swap.SWAP, tolerance=-1)
