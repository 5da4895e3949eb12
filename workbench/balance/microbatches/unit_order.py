"""Order in which units, runs of microbatches that stay together, enter a pipeline."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.balance.microbatches.pipeline_time import Order, Seconds, eager_starts
from workbench.balance.microbatches.reorder import time_matrices
from workbench.compiled import compiled

Units = NDArray[np.int64]  # [U, longest] microbatches of each unit, -1 behind the last
MOST_PASSES = 300_000_000  # that improving one order may play: about a second


class UnitOrder(NamedTuple):
    """Units in the chosen order, and the iteration time by the recurrence."""

    units: tuple[int, ...]
    iteration_s: float


def order_units(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    units: Sequence[Sequence[int]],
    leads: Sequence[int] = (),
) -> UnitOrder:
    """Exchange and move units as long as that shortens the iteration of the whole 1F1B pipeline.

    Ours: Entrain (dissertation, section 4.5.2) leaves the order of its pairs open. Two starts are
    improved, the given order and one with the shortest units first and last, the longest in the
    middle; the faster result is taken, the given order's when equal. Never slower than the given order.

    Args:
        forward_s, backward_s: [M, p] seconds of every microbatch on every stage of the chain.
        units: [U] microbatches that stay together, in order; every microbatch in one unit.
        leads: [p] forwards that a stage runs ahead beyond 1F1B, never rising along the chain; empty: 0.

    Raises:
        ValueError: times as in `reorder_microbatches`, units that are no partition, leads that rise.

    Complexity: O(U^2 M p) a round, compiled, without changes that exchange equal units; rounds end at the
    first that finds nothing, or at `MOST_PASSES`.
    """
    problem = _problem(forward_s, backward_s, units, leads)
    kinds, most = _kinds(problem), max(1, MOST_PASSES // (2 * problem.forward_s.size))
    candidates = [_improve(*problem, start, kinds, most) for start in _starts(problem, units)]
    order, iteration_s = min(candidates, key=lambda candidate: candidate[1])
    return UnitOrder(tuple(map(int, order)), float(iteration_s))


def unimproved_order(
    forward_s: ArrayLike, backward_s: ArrayLike, units: Sequence[Sequence[int]], leads: Sequence[int] = ()
) -> UnitOrder:
    """Return the faster of the two orders that `order_units` starts from; arguments and errors as there.

    Complexity: O(M p).
    """
    problem = _problem(forward_s, backward_s, units, leads)
    candidates = [(start, float(_time_s(*problem, start))) for start in _starts(problem, units)]
    order, iteration_s = min(candidates, key=lambda candidate: candidate[1])
    return UnitOrder(tuple(map(int, order)), iteration_s)


class _Problem(NamedTuple):
    forward_s: Seconds
    backward_s: Seconds
    table: Units
    warmups: Order


def _problem(
    forward_s: ArrayLike, backward_s: ArrayLike, units: Sequence[Sequence[int]], leads: Sequence[int]
) -> _Problem:
    forward, backward = time_matrices(forward_s, backward_s)
    num, stages = forward.shape
    if sorted(microbatch for unit in units for microbatch in unit) != list(range(num)) or () in map(
        tuple, units
    ):
        raise ValueError(
            f"units must contain each of {num} microbatches once, and none be empty, got {units}"
        )
    ahead = np.array(leads or [0] * stages)
    if len(ahead) != stages or (np.diff(ahead) > 0).any() or ahead[-1] < 0:
        raise ValueError(f"want {stages} leads >= 0 that never rise along the chain, got {tuple(leads)}")
    table = np.full((len(units), max(map(len, units))), -1)
    for row, unit in enumerate(units):
        table[row, : len(unit)] = unit
    return _Problem(forward, backward, table, np.arange(stages, 0, -1) + ahead)


def _starts(problem: _Problem, units: Sequence[Sequence[int]]) -> tuple[Order, Order]:
    """Return the given order, and one with the shortest units first and last."""
    work_s = (problem.forward_s + problem.backward_s).sum(axis=1)
    weight_s = [float(work_s[list(unit)].sum()) / len(unit) for unit in units]
    rising = sorted(range(len(units)), key=lambda unit: (weight_s[unit], unit))
    return np.arange(len(units)), np.array(rising[::2] + rising[1::2][::-1])


def _kinds(problem: _Problem) -> Order:
    """[U] a number of each unit, the same for units whose microbatches take equal times."""
    seconds = np.concatenate((problem.forward_s, problem.backward_s), axis=1)
    of_unit = np.where(problem.table[:, :, None] >= 0, seconds[problem.table], -1.0)
    return np.unique(of_unit.reshape(len(of_unit), -1), axis=0, return_inverse=True)[1].reshape(-1)


@compiled
def _time_s(forward_s: Seconds, backward_s: Seconds, table: Units, warmups: Order, order: Order) -> float:
    members = table[order].ravel()
    last = eager_starts(forward_s, backward_s, members[members >= 0], warmups)[1, -1]
    return float(last)


@compiled
def _improve(
    forward_s: Seconds,
    backward_s: Seconds,
    table: Units,
    warmups: Order,
    start: Order,
    kinds: Order,
    most: int,
) -> tuple[Order, float]:
    """Take the first improvement by an exchange of two units or a move of one, in rounds; `most` plays."""
    order = start.copy()
    num_left = most
    best_s = _time_s(forward_s, backward_s, table, warmups, order)
    improved = True
    while improved:
        improved = False
        for source in range(len(order)):
            for target in range(len(order)):
                changed = order.copy()
                if source < target:
                    changed[source], changed[target] = order[target], order[source]
                elif target + 1 < source:
                    changed[target] = order[source]
                    changed[target + 1 : source + 1] = order[target:source]
                if (kinds[changed] == kinds[order]).all():
                    continue
                if num_left == 0:
                    return order, best_s
                num_left -= 1
                time_s = _time_s(forward_s, backward_s, table, warmups, changed)
                if time_s < best_s * (1 - 1e-12):
                    order, best_s, improved = changed, time_s, True
    return order, best_s
