"""Pairs overloaded with underloaded microbatches so that the heaviest of all is as light as possible."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.on_demand import OnDemand

optimize, sparse = OnDemand("scipy.optimize"), OnDemand("scipy.sparse")
csgraph = OnDemand("scipy.sparse.csgraph")

Loads = NDArray[np.int64]  # whole units, so that thresholds compare exactly


class Match(NamedTuple):
    """A pairing of microbatches.

    Args:
        bottleneck: the heaviest microbatch afterwards.
        partners: [O] the underloaded microbatch of each overloaded one, all different.
        defers: [O] whether the pair moves work; else both do their own.
    """

    bottleneck: int
    partners: tuple[int, ...]
    defers: tuple[bool, ...]


Matching = Callable[[Loads, Loads, Loads], Match]


def bottleneck_match(paired: Loads, overloaded: Loads, underloaded: Loads) -> Match:
    """Return the least threshold that all microbatches can keep, and a matching that keeps it.

    Source: Entrain (dissertation, section 4.5.2), BottleneckMatch: binary search over the entries of V
    and L; a threshold is feasible when a bipartite matching serves all overloaded microbatches that
    exceed it alone. The others get the remaining partners and defer nothing.
    Differs: the middle one of an odd number may exceed the threshold too; then it needs a partner as well.

    Args:
        paired: [O, U] V of Eq. 4.3, the heavier of a pair after deferral; at most `overloaded`.
        overloaded: [O] L, work of each overloaded microbatch alone.
        underloaded: [U] the same of the others, none above any overloaded one; U is O or O + 1.

    Complexity: O(E sqrt(O) log(O U)) for the E pairs under the threshold.
    """
    work = _square(paired, underloaded)
    if not overloaded.size:
        return Match(int(underloaded.max(initial=0)), (), ())
    candidates = np.unique(np.concatenate([paired.ravel(), overloaded, underloaded]))
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if (_columns(work <= candidates[middle]) >= 0).all():
            high = middle
        else:
            low = middle + 1
    least = int(candidates[low])
    partners = _columns(work <= least)[: len(overloaded)]
    return Match(least, tuple(map(int, partners)), tuple(map(bool, overloaded > least)))


def even_match(paired: Loads, overloaded: Loads, underloaded: Loads) -> Match:
    """Return the same threshold, and of the matchings that keep it the one with the most even microbatches.

    Ours: the printed algorithm is indifferent to all microbatches but the heaviest. Here every pair
    may defer, pairs above the threshold are forbidden, and the Hungarian method minimises the sum
    of the pairs' squared heavier loads. Arguments: `bottleneck_match`.

    Complexity: O(O^3).
    """
    least = bottleneck_match(paired, overloaded, underloaded)
    if not overloaded.size:
        return least
    work = _square(paired, underloaded)
    relative = work / max(least.bottleneck, 1)
    forbidden = 2.0 * len(relative)  # more than all allowed pairs together
    costs = np.where(work <= least.bottleneck, relative**2, forbidden)
    _, columns = optimize.linear_sum_assignment(costs)
    partners = tuple(map(int, columns[: len(overloaded)]))
    defers = tuple(bool(paired[row, column] < overloaded[row]) for row, column in enumerate(partners))
    return Match(least.bottleneck, partners, defers)


def _square(paired: Loads, underloaded: Loads) -> Loads:
    """Return V with a row for the microbatch without a partner, if there is one more underloaded one."""
    num_rows, num_columns = paired.shape
    if num_columns - num_rows not in (0, 1) or num_columns != len(underloaded):
        raise ValueError(
            f"want as many underloaded microbatches as overloaded, or one more, got {paired.shape}"
        )
    if num_rows == num_columns:
        return paired
    return np.vstack([paired, underloaded])


def _columns(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[rows] the column of every row in a maximum matching; -1 where it has none."""
    columns: NDArray[np.int32] = csgraph.maximum_bipartite_matching(
        sparse.csr_array(allowed), perm_type="column"
    )
    return columns
