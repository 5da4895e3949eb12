"""The compiled heart of divide and conquer: one best answer per subproblem, filled from below."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NEVER = np.int64(1) << 60


@njit(cache=True)  # type: ignore[untyped-decorator]
def place_of(num_layers: int, first: int, end: int) -> int:
    """Where layers first..end-1 stand in a table of all runs."""
    return first * num_layers - first * (first - 1) // 2 + end - first - 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill(  # noqa: PLR0913, PLR0917  (tables of one struct of arrays)
    t1: Ints, t3: Ints, slow: Ints, where: Ints, slots: Ints, splits: Ints, slot: int, num_stages: int
) -> None:
    """Every run of layers of one (GPUs, stages): the best split into two smaller problems.

    Complexity: O(splits x stages x layers**3 / 6).
    """
    num_layers = where[0]
    for first in range(num_layers - num_stages + 1):
        for end in range(first + num_stages, num_layers + 1):
            best_split(t1, t3, slow, where, slots, splits, slot, num_stages, first, end)


@njit(cache=True)  # type: ignore[untyped-decorator]
def best_split(  # noqa: PLR0913, PLR0917
    t1: Ints,
    t3: Ints,
    slow: Ints,
    where: Ints,
    slots: Ints,
    splits: Ints,
    slot: int,
    num_stages: int,
    first: int,
    end: int,
) -> tuple[int, int, int]:
    """Write a run's T1, T3 and slowest stage, and return the split (row of `splits`, stages, layer).

    Args:
        t1, t3: [slots][runs]; slow: [2][slots][runs] the slowest stage's units and index.
        where: [1] layers. slots: [levels][stages + 1] slot of a level and stage count, -1 without.
        splits: [X][2] levels that the GPUs may be cut into.
    """
    num_layers = where[0]
    best, chosen = NEVER, (-1, 0, 0)
    values = (NEVER, NEVER, NEVER, NEVER)
    for row in range(splits.shape[0]):
        for left in range(1, num_stages):
            one, two = slots[splits[row, 0], left], slots[splits[row, 1], num_stages - left]
            if one < 0 or two < 0:
                continue
            for cut in range(first + left, end - (num_stages - left) + 1):
                a, b = place_of(num_layers, first, cut), place_of(num_layers, cut, end)
                if t1[one, a] >= NEVER or t1[two, b] >= NEVER:
                    continue
                total = t1[one, a] + t1[two, b]
                if slow[0, one, a] > slow[0, two, b]:
                    longest, index, tail = slow[0, one, a], slow[1, one, a], t3[one, a] + t1[two, b]
                else:
                    longest, index, tail = slow[0, two, b], slow[1, two, b] + left, t3[two, b]
                value = total + (3 * num_stages + index - 1) * longest + tail
                if value < best:
                    best, chosen = value, (row, left, cut)
                    values = (total, tail, longest, index)
    if slot >= 0:
        run = place_of(num_layers, first, end)
        t1[slot, run], t3[slot, run] = values[0], values[1]
        slow[0, slot, run], slow[1, slot, run] = values[2], values[3]
    return chosen
