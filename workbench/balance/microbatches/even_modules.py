"""Groups of equally many samples that are even in every module, not only in the sum of all modules."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.arrays import Floats
from workbench.balance.tokens.exchange import equal_counts_exchanged
from workbench.compiled import compiled

LEAST_GAIN = 1e-9  # relative; smaller ones are rounding
MOST_SWAPS = 2000


def check_equal_counts(num_samples: int, num_groups: int) -> None:
    """ValueError where samples do not divide into groups of equal counts."""
    if num_samples % num_groups:
        raise ValueError(f"{num_samples} samples do not divide into {num_groups} equal groups")


def even_in_every_module(
    work_s: Sequence[Sequence[float]], num_groups: int, *, most_swaps: int = MOST_SWAPS
) -> list[list[int]]:
    """Split samples into groups of equal counts with a small sum over modules of the heaviest group's work.

    That sum bounds a step in which the groups of all ranks pass a module together, as where each of its
    layers gathers its weights: a group that is light in one module does not make up for being heavy in
    another.

    Starts with groups even in all modules together. A step takes, for each module, its heaviest group, looks
    at every swap of one of its samples with one of another group, and makes the best, the first of equals. It
    stops when no swap helps, or after `most_swaps`.

    Args:
        work_s: [M][B] seconds of each sample in each module, finite and >= 0.
        num_groups: G, which divides B.

    Returns:
        the indices of each group's samples, ascending.

    Raises:
        ValueError: as `equal_counts_exchanged`, or samples that do not divide.

    Complexity: O(M^2 B^2 / G) per swap.
    """
    work = np.array(work_s, np.float64)
    num_samples = work.shape[1]
    check_equal_counts(num_samples, num_groups)
    owners = equal_counts_exchanged(work.sum(axis=0), num_groups)
    if num_groups > 1:
        loads = np.array([np.bincount(owners, each, num_groups) for each in work])
        _swap(work, owners, loads, most_swaps)
    return [np.flatnonzero(owners == group).tolist() for group in range(num_groups)]


@compiled
def _swap(work: Floats, owners: NDArray[np.int32], loads: Floats, most_swaps: int) -> None:
    """Change owners and loads [M, G] in place."""
    for _ in range(most_swaps):
        give, take = _best_swap(work, owners, loads)
        if give < 0:
            return
        our_group, their_group = owners[give], owners[take]
        owners[give], owners[take] = their_group, our_group
        for module in range(work.shape[0]):
            moved = work[module, take] - work[module, give]
            loads[module, our_group] += moved
            loads[module, their_group] -= moved


@compiled
def _best_swap(work: Floats, owners: NDArray[np.int32], loads: Floats) -> tuple[int, int]:
    """Two samples, of which the first is in the heaviest group of a module; (-1, -1): no swap helps."""
    heaviest = _heaviest(loads)
    best_s = 0.0
    for module in range(work.shape[0]):
        best_s += loads[module, heaviest[module, 0]]
    best_s *= 1 - LEAST_GAIN
    give, take = -1, -1
    for group in heaviest[:, 0]:
        for ours in np.flatnonzero(owners == group):
            for theirs in np.flatnonzero(owners != group):
                swap = (int(ours), int(group)), (int(theirs), int(owners[theirs]))
                after_s = _sum_after_s(work, loads, heaviest, *swap)
                if after_s < best_s:
                    best_s, give, take = after_s, int(ours), int(theirs)
    return give, take


@compiled
def _heaviest(loads: Floats) -> NDArray[np.int64]:
    """The three heaviest groups of each module [M, 3], the first of equals first; -1 for none."""
    num_modules, num_groups = loads.shape
    found = np.full((num_modules, 3), -1, np.int64)
    for module in range(num_modules):
        for group in range(num_groups):
            place = 3
            while place > 0 and (
                found[module, place - 1] < 0 or loads[module, group] > loads[module, found[module, place - 1]]
            ):
                place -= 1
            for later in range(2, place, -1):
                found[module, later] = found[module, later - 1]
            if place < 3:
                found[module, place] = group
    return found


@compiled
def _sum_after_s(
    work: Floats,
    loads: Floats,
    heaviest: NDArray[np.int64],
    ours: tuple[int, int],
    theirs: tuple[int, int],
) -> float:
    """The sum over modules of the heaviest group's work after a swap of (sample, its group)."""
    (our_sample, our_group), (their_sample, their_group) = ours, theirs
    total_s = 0.0
    for module in range(work.shape[0]):
        moved = work[module, their_sample] - work[module, our_sample]
        most_s = max(loads[module, our_group] + moved, loads[module, their_group] - moved)
        for place in range(3):
            group = heaviest[module, place]
            is_ours = group == our_group
            if group >= 0 and not is_ours and group != their_group:
                most_s = max(most_s, loads[module, group])
                break
        total_s += most_s
    return total_s
