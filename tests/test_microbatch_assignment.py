"""Entrain's assignment: every part against its definition, its bound or all possibilities."""

from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from workbench.balance.microbatches.assignment import hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import bottleneck_match, even_match
from workbench.balance.microbatches.deferral import pairwise_deferral, whole_units
from workbench.balance.microbatches.replicas import assign_to_replicas
from workbench.balance.microbatches.stratified import (
    coarse_and_fine,
    effective_microbatches,
    stratified_microbatches,
)
from workbench.balance.microbatches.subset_sums import SubsetSums

MATCHINGS = (bottleneck_match, even_match)
units = st.integers(0, 9)
works = st.lists(st.tuples(units, st.integers(1, 9)), min_size=1, max_size=24)


def least_makespan(work: list[int], num_bins: int) -> int:
    """Over all assignments."""
    return min(
        max(sum(w for w, b in zip(work, where, strict=True) if b == i) for i in range(num_bins))
        for where in product(range(num_bins), repeat=len(work))
    )


def subsets(members: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [chosen for size in range(len(members) + 1) for chosen in combinations(members, size)]


def least_bottleneck(microbatches: list[tuple[int, ...]], llm: list[int]) -> int:
    """Over all pairings of the heavier half with the lighter one and all subsets that could move."""
    loads = [sum(llm[s] for s in members) for members in microbatches]
    order = sorted(range(len(loads)), key=lambda index: (-loads[index], index))
    over, under = order[: len(order) // 2], order[len(order) // 2 :]
    best = max(loads)
    for partners in permutations(under, len(over)):
        pairs = list(zip(over, partners, strict=True))
        after = [
            min(
                max(loads[i] - sum(llm[s] for s in moved), loads[j] + sum(llm[s] for s in moved))
                for moved in subsets(microbatches[i])
            )
            for i, j in pairs
        ]
        alone = [loads[j] for j in under if j not in partners]
        best = min(best, max((*after, *alone)))
    return best


@given(works, st.integers(1, 5))
def test_replicas_share_the_samples_out_evenly(samples: list[tuple[int, int]], num_replicas: int):
    num_replicas = min(num_replicas, len(samples))
    encoder, llm = zip(*samples, strict=True)
    found = assign_to_replicas(encoder, llm, num_replicas)
    assert sorted(s for members in found for s in members) == list(range(len(samples)))
    sizes = [len(members) for members in found]
    assert max(sizes) - min(sizes) <= 1


def test_replicas_take_the_heaviest_encoder_first_and_the_lightest_llm():
    assert assign_to_replicas([5, 4, 3, 2], [1, 5, 1, 1], 2) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("encoder", "wanted", "expected"),
    [
        pytest.param([1, 1, 1, 1], 2, 2, id="as-wanted"),
        pytest.param([8, 1, 1, 2], 4, 1, id="one-heavy-sample"),
        pytest.param([4, 4, 4, 1], 4, 3, id="three-and-a-bit"),
        pytest.param([0, 0, 0], 2, 2, id="text-only"),
        pytest.param([3], 5, 1, id="one-sample"),
        pytest.param([0.1] * 10, 10, 10, id="no-rounding-down"),
    ],
)
def test_effective_number_of_microbatches(encoder: list[float], wanted: int, expected: int):
    assert effective_microbatches(encoder, wanted) == expected


def test_coarse_samples_have_more_llm_work():
    assert coarse_and_fine([0, 1, 2, 3, 4], [1, 9, 5, 7, 2]) == ([1, 3], [2, 4, 0])


@given(works, st.integers(1, 6))
def test_microbatches_partition_the_samples(samples: list[tuple[int, int]], wanted: int):
    encoder, llm = zip(*samples, strict=True)
    found = stratified_microbatches(encoder, llm, wanted)
    assert sorted(s for members in found for s in members) == list(range(len(samples)))
    assert len(found) == effective_microbatches(encoder, wanted)
    assert all(found)


@examples(300)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7), st.integers(1, 3))
def test_encoder_work_is_within_the_bound_of_list_scheduling(samples: list[tuple[int, int]], wanted: int):
    encoder, llm = (list(column) for column in zip(*samples, strict=True))
    found = stratified_microbatches(encoder, llm, wanted)
    slowest = max(sum(encoder[s] for s in members) for members in found)
    bound = 2 - 1 / len(found)
    assert slowest <= bound * least_makespan(encoder, len(found)) + 1e-9


@given(st.lists(units, max_size=8), st.lists(st.floats(-5, 80), min_size=1, max_size=5))
def test_nearest_subset_sum_is_nearest(work: list[int], targets: list[float]):
    table = SubsetSums(work)
    sums = {sum(work[i] for i in chosen) for chosen in subsets(tuple(range(len(work))))}
    for target, found in zip(targets, table.nearest(np.array(targets)), strict=True):
        assert abs(found - target) == min(abs(s - target) for s in sums)
        assert sum(work[i] for i in table.subset(int(found))) == found


def test_a_sum_that_no_subset_has_is_refused():
    with pytest.raises(ValueError, match="no subset has the sum 4"):
        SubsetSums([3, 5]).subset(4)


@pytest.mark.parametrize("match", MATCHINGS)
@examples(500)
@given(
    st.lists(
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    )
)
def test_bottleneck_is_the_least_over_all_pairings(match, works_of: list[list[int]]):
    llm = [work for members in works_of for work in members]
    ends = np.cumsum([0, *map(len, works_of)])
    microbatches = [tuple(range(a, b)) for a, b in pairwise(ends.tolist())]
    deferral = pairwise_deferral(microbatches, llm, match)
    after = deferral.llm_microbatches(microbatches)
    assert sorted(deferral.order) == list(range(len(microbatches)))
    assert sorted(s for members in after for s in members) == list(range(len(llm)))
    assert all(after)
    assert max(sum(llm[s] for s in members) for members in after) == least_bottleneck(microbatches, llm)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=12))
def test_even_matching_is_never_less_even(works_of: list[list[int]]):
    llm = [work for members in works_of for work in members]
    ends = np.cumsum([0, *map(len, works_of)])
    microbatches = [tuple(range(a, b)) for a, b in pairwise(ends.tolist())]

    def heavier_of_pairs(match) -> int:
        after = pairwise_deferral(microbatches, llm, match).llm_microbatches(microbatches)
        loads = [sum(llm[s] for s in members) for members in after]
        return sum(max(loads[i : i + 2]) ** 2 for i in range(0, len(loads), 2))

    assert heavier_of_pairs(even_match) <= heavier_of_pairs(bottleneck_match)


@pytest.mark.parametrize("match", MATCHINGS)
def test_matching_of_the_worked_example(match):
    """Entrain figure 4.10b: rows MB3, MB4, MB6, columns MB1, MB2, MB5; V is printed, L is above it.

    Its threshold is 6 and one matching keeps it: MB3-MB2, MB4-MB5, MB6-MB1.
    """
    paired = np.array([[6, 6, 8], [6, 6, 6], [6, 7, 9]])
    found = match(paired, np.array([9, 9, 10]), np.array([2, 3, 5]))
    assert found.bottleneck == 6
    assert found.partners == (1, 2, 0)
    assert all(found.defers)


def test_microbatches_that_fit_alone_defer_nothing():
    found = bottleneck_match(np.array([[5, 6], [4, 6]]), np.array([9, 6]), np.array([1, 6]))
    assert found.bottleneck == 6
    assert found.defers == (True, False)


def test_deferred_work_is_done_by_the_next_microbatch():
    found = pairwise_deferral([(0, 1, 2), (3,)], [4, 2, 2, 2])
    assert found.order == (0, 1)
    assert found.deferred in (((1,), ()), ((2,), ()))
    moved = found.deferred[0][0]
    assert found.llm_microbatches([(0, 1, 2), (3,)]) == (
        tuple({0, 1, 2} - {moved}),
        tuple(sorted((moved, 3))),
    )


def test_seconds_are_counted_in_fine_units():
    assert whole_units([(0, 1), (2,)], [0.25, 0.5, 0.375]) == ((5461, 10923), (8192,))


@given(works, st.integers(1, 3), st.integers(1, 5))
def test_every_sample_stands_once_on_both_sides(
    samples: list[tuple[int, int]], num_replicas: int, num_microbatches: int
):
    num_replicas = min(num_replicas, len(samples))
    encoder, llm = zip(*samples, strict=True)
    found = hierarchical_assignment(
        encoder, llm, num_replicas=num_replicas, num_microbatches=num_microbatches
    )
    assert len(found) == num_replicas
    for side in ("encoder", "llm"):
        stands = [s for replica in found for members in getattr(replica, side) for s in members]
        assert sorted(stands) == list(range(len(samples)))
    for replica in found:
        for index, deferred in enumerate(replica.deferred):
            assert set(deferred) <= set(replica.encoder[index])
            assert not deferred or set(deferred) <= set(replica.llm[index + 1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0], [1.0, 2.0], 1), "both workloads"),
        (([-1.0], [1.0], 1), "sample 0: encoder work"),
        (([1.0], [float("nan")], 1), "sample 0: LLM work"),
        (([1.0], [1.0], 2), "1..1 replicas"),
    ],
)
def test_bad_input_is_named(arguments, words: str):
    with pytest.raises(ValueError, match=words):
        assign_to_replicas(*arguments)
