"""Reordering under interleaved 1F1B: intervals against plays, orders against all orders."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from workbench.balance.microbatches.reorder_interleaved import Walk, reorder_in_programs
from workbench.schedule.action import Action, Pass
from workbench.schedule.interleaved import interleaved_1f1b


def play(forward: np.ndarray, backward: np.ndarray, programs) -> dict[Action, float]:
    """When every action starts if it waits for its rank and its input alone."""
    last = forward.shape[1] - 1
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    left = [list(program) for program in programs]
    free_s = [0.0] * len(left)
    while any(left):
        for rank, program in enumerate(left):
            action = program[0] if program else None
            if action is None:
                continue
            is_forward, stage = action.kind is Pass.F, action.stage
            if is_forward:
                needed = Action(stage - 1, Pass.F, action.microbatch) if stage else None
            else:
                needed = Action(
                    *((stage, Pass.F) if stage == last else (stage + 1, Pass.B)), action.microbatch
                )
            if needed is None or needed in ends:
                starts[action] = max(free_s[rank], ends.get(needed, 0.0))
                free_s[rank] = (
                    starts[action] + (forward if is_forward else backward)[action.microbatch, stage]
                )
                ends[action] = free_s[rank]
                program.pop(0)
    return starts


def times(num: int, stages: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The first stage varies, as an encoder in front does."""
    forward = np.ones((num, stages))
    forward[:, 0] = np.random.default_rng(seed).lognormal(0, 0.7, num)
    return forward, 2 * forward


def reordered(forward: np.ndarray, backward: np.ndarray, num_ranks: int) -> tuple[int, ...]:
    num, stages = forward.shape
    return reorder_in_programs(forward, backward, interleaved_1f1b(range(stages), num_ranks, num))


def step_s(forward: np.ndarray, backward: np.ndarray, num_ranks: int, order) -> float:
    programs = interleaved_1f1b(range(forward.shape[1]), num_ranks, len(forward))
    placed = list(order)
    starts = play(forward[placed], backward[placed], programs)
    return max(
        start + backward[placed[a.microbatch], a.stage] for a, start in starts.items() if a.kind is Pass.B
    )


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_equal_microbatches_take_the_closed_form(num_ranks: int, virtual: int, more: int):
    """Narayanan et al.: (p - 1)(f + b) / v of bubble for a multiple of p microbatches."""
    num = num_ranks * (1 + more)
    stages = num_ranks * virtual
    forward = np.ones((num, stages))
    found_s = step_s(forward, 2 * forward, num_ranks, range(num))
    assert found_s == 3.0 * (num * virtual + num_ranks - 1)


@examples(40)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(0, 99))
def test_orders_are_permutations_with_the_smallest_first_and_last(
    num_ranks: int, virtual: int, more: int, seed: int
):
    num = num_ranks + more
    forward, backward = times(num, num_ranks * virtual, seed)
    found = reordered(forward, backward, num_ranks)
    assert sorted(found) == list(range(num))
    smallest = [int(index) for index in np.argsort(forward[:, 0], kind="stable")]
    assert found[0] == smallest[0]
    assert sorted(found[num - num_ranks + 1 :]) == sorted(smallest[1:num_ranks])


@examples(30)
@given(st.integers(2, 3), st.integers(1, 2), st.integers(1, 4), st.integers(0, 99), st.data())
def test_an_interval_is_what_a_forward_may_take_before_the_next_action_is_late(
    num_ranks: int, virtual: int, more: int, seed: int, data
):
    num, stages = num_ranks + more, num_ranks * virtual
    forward, backward = times(num, stages, seed)
    programs = interleaved_1f1b(range(stages), num_ranks, num)
    index = data.draw(st.integers(1, num - 1))
    walk = Walk(programs, stages)
    gaps = walk.intervals(forward, backward, index)
    assert gaps.shape == (virtual,)
    assert (gaps >= 0).all()
    without = forward.copy()
    without[index, ::num_ranks] = 0
    starts = play(without, backward, programs)
    start_s, _ = walk.starts_s(without, backward)
    assert {action: start_s[number] for action, number in walk.number.items()} == starts
    line = list(programs[0])
    for chunk, gap in enumerate(gaps):
        at = line.index(Action(chunk * num_ranks, Pass.F, index))
        before, after = line[at - 1], line[at + 1]
        took = (without if before.kind is Pass.F else backward)[before.microbatch, before.stage]
        assert starts[after] == pytest.approx(starts[before] + took + gap)


def test_on_average_it_is_faster_than_the_given_order_and_near_the_best_of_all():
    over_given, over_best = [], []
    for seed in range(6):
        forward, backward = times(6, 4, seed)
        ours_s = step_s(forward, backward, 2, reordered(forward, backward, 2))
        over_given.append(ours_s / step_s(forward, backward, 2, range(6)))
        best_s = min(step_s(forward, backward, 2, order) for order in permutations(range(6)))
        over_best.append(ours_s / best_s)
    assert min(over_best) >= 1 - 1e-12
    assert np.mean(over_given) < 1
    assert max(over_best) < 1.15


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="multiple of 2 ranks"):
        reordered(np.ones((4, 3)), np.ones((4, 3)), 2)
    with pytest.raises(ValueError, match="both passes"):
        reordered(np.ones((4, 3)), np.ones((4, 2)), 1)
