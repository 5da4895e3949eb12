"""DistTrain's reordering: its rules, and the iteration times against all orders."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.balance.microbatches.pipeline_time import first_stage_starts, iteration_s
from workbench.balance.microbatches.reorder import reorder_by_exchanges, reorder_microbatches, reorder_samples
from workbench.balance.tokens.policies import longest_first_equal_counts
from workbench.schedule.one_f_one_b import one_f_one_b


def times(num_microbatches: int, num_stages: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An encoder stage that varies in front of LLM stages that do not."""
    rng = np.random.default_rng(seed)
    forward = np.ones((num_microbatches, num_stages))
    forward[:, 0] = rng.lognormal(0, 0.7, num_microbatches)
    return forward, 2 * forward


@pytest.mark.parametrize(("num_microbatches", "num_stages"), [(1, 3), (2, 4), (5, 2), (7, 4), (4, 1)])
def test_equal_microbatches_take_the_closed_form(num_microbatches: int, num_stages: int):
    forward = np.full((num_microbatches, num_stages), 1.0)
    found_s = iteration_s(forward, 2 * forward, np.arange(num_microbatches))
    assert found_s == 3.0 * (num_microbatches + num_stages - 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 50))
def test_recurrence_equals_an_execution_of_the_programs(num: int, stages: int, seed: int):
    rng = np.random.default_rng(seed)
    forward, backward = rng.random((num, stages)), rng.random((num, stages))
    programs = one_f_one_b(range(stages), num)
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    todo = [list(program) for program in programs]
    while any(todo):
        for s, actions in enumerate(todo):
            while actions:
                kind, m = str(actions[0].kind), actions[0].microbatch
                if kind == "F":
                    needs = [("F", s - 1, m)] if s else []
                else:
                    needs = [("B", s + 1, m)] if s + 1 < stages else [("F", s, m)]
                if any(need not in ends for need in needs):
                    break
                ready = max([free[s], *(ends[need] for need in needs)])
                free[s] = ready + (forward if kind == "F" else backward)[m, s]
                ends[kind, s, m] = free[s]
                actions.pop(0)
    found = first_stage_starts(forward, backward, np.arange(num))
    assert found[1].tolist() == [ends["B", 0, m] for m in range(num)]


def test_samples_go_to_the_least_loaded_group():
    assert reorder_samples([4, 3, 2, 1], 2) == ((0, 3), (1, 2))
    assert reorder_samples([9, 1, 1, 1], 2) == ((0,), (1, 2, 3))
    assert reorder_samples([9, 1, 1, 1], 2, longest_first_equal_counts) == ((0, 3), (1, 2))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_orders_are_permutations_with_the_smallest_first_and_last(num: int, stages: int, seed: int):
    forward, backward = times(num, stages, seed)
    found = reorder_microbatches(forward, backward)
    assert sorted(found) == list(range(num))
    smallest = [int(index) for index in np.argsort(forward[:, 0], kind="stable")]
    assert found[0] == smallest[0]
    if num > stages:
        assert list(found[num - stages + 1 :]) == smallest[1:stages]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 99))
def test_exchanges_are_never_slower_and_near_the_best_of_all_orders(num: int, stages: int, seed: int):
    forward, backward = times(num, stages, seed)
    best_s = min(iteration_s(forward, backward, np.array(order)) for order in permutations(range(num)))
    printed_s, given_s, ours_s = (
        iteration_s(forward, backward, np.array(order))
        for order in (
            reorder_microbatches(forward, backward),
            range(num),
            reorder_by_exchanges(forward, backward),
        )
    )
    assert ours_s <= min(printed_s, given_s)
    assert best_s <= ours_s <= 1.05 * best_s


@pytest.mark.parametrize(
    ("forward", "backward", "words"),
    [
        ([[1.0]], [[1.0, 2.0]], r"both passes"),
        ([1.0], [1.0], r"both passes"),
        ([[-1.0]], [[1.0]], r">= 0"),
        ([[float("nan")]], [[1.0]], r">= 0"),
    ],
)
def test_bad_input_is_named(forward, backward, words: str):
    with pytest.raises(ValueError, match=words):
        reorder_microbatches(forward, backward)
