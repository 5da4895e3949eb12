"""Token distribution better than longest first: exchanges with the heaviest rank."""

from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.balance.tokens.compiled import descending_order
from workbench.balance.tokens.policies import (
    Owners,
    checked_owners,
    longest_first,
    longest_first_equal_counts,
    whole_units,
)
from workbench.compiled import compiled

EVEN_ENOUGH = 1e-4


class Swap(Enum):
    """Allowed exchanges: move a block or swap two, or swap only (counts stay)."""

    MOVE_OR_SWAP = "move or swap"
    SWAP = "swap"


def longest_first_exchanged(work: ArrayLike, num_ranks: int) -> Owners:
    """Apply `longest_first`, then `exchanged` where that is not even: never worse, and as deterministic.

    Arguments and errors: `longest_first`.
    """
    return exchanged(work, longest_first(work, num_ranks), num_ranks, Swap.MOVE_OR_SWAP)


def equal_counts_exchanged(work: ArrayLike, num_ranks: int) -> Owners:
    """Apply `longest_first_equal_counts`, then swaps where that is not even; block counts stay equal.

    Arguments and errors: `longest_first`.
    """
    return exchanged(work, longest_first_equal_counts(work, num_ranks), num_ranks, Swap.SWAP)


def exchanged(
    work: ArrayLike,
    owners: ArrayLike,
    num_ranks: int,
    exchange: Swap,
    *,
    tolerance: float = EVEN_ENOUGH,
    most_steps: int = 1000,
) -> Owners:
    """Return owners after steps that each lighten the heaviest rank as much as one exchange can.

    A step takes the heaviest rank (the lowest of equals) and looks at every block of it against every
    block of every other rank, from the lightest rank on. It makes the exchange that leaves the heavier
    of the two lightest, the first of equals, and looks no further than a rank with which both become
    even. It stops when the heaviest rank is even up to the tolerance, when no exchange lightens it, or
    after `most_steps`. Finn and Horowitz 1979, "A linear time approximation algorithm for multiprocessor
    scheduling", BIT 19, exchange between the heaviest and the lightest rank only.

    Args:
        work: [B] work of each block, finite and >= 0.
        owners: [B] where to start.
        num_ranks: G.
        exchange: whether a block may also be moved without a swap.
        tolerance: a heaviest rank of (1 + tolerance) times the mean is even enough; at 0, only the mean,
            rounded up to a whole unit, is.
        most_steps: limit on the number of steps.

    Returns:
        int32 [B] owners; the heaviest rank is at most as heavy as before.

    Raises:
        ValueError: errors of `checked_owners` and of `longest_first`; a negative tolerance or number
            of steps.

    Complexity: O(G B_heaviest + B) per step.
    """
    if most_steps < 0:
        raise ValueError(f"most_steps must be >= 0, got {most_steps}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be >= 0, got {tolerance}")
    units = whole_units(work, num_ranks)
    new_owners = checked_owners(owners, units.size, num_ranks)
    loads = np.zeros(num_ranks, np.int64)
    np.add.at(loads, new_owners, units)
    total = int(units.sum())
    even = max(-(-total // num_ranks), int(total / num_ranks * (1 + min(tolerance, num_ranks))))
    if loads.max() > even:
        num_blanks = 1 if exchange is Swap.MOVE_OR_SWAP else 0
        _exchange(units, new_owners, loads, descending_order(units), even, (num_blanks, most_steps))
    return new_owners


@compiled
def _exchange(
    work: NDArray[np.int64],
    owners: NDArray[np.int32],
    loads: NDArray[np.int64],
    order: NDArray[np.int32],
    even: int,
    limits: tuple[int, int],
) -> None:
    """Change owners and loads in place, in `limits[1]` steps at most.

    With `limits[0]` blanks per rank, 0 or 1, a block may be given for nothing.
    """
    num_blanks, most_steps = limits
    starts = np.empty(loads.size + 1, np.int64)
    blocks = np.empty(work.size, np.int32)  # rank by rank, heaviest first
    for _ in range(most_steps):
        heavy = np.argmax(loads)
        if loads[heavy] <= even:
            return
        _group(owners, order, starts, blocks)
        best, give, take, other = loads[heavy], -1, -1, -1
        for rank in np.argsort(loads, kind="mergesort"):
            if loads[heavy] + loads[rank] >= 2 * best or best <= even:
                break  # not even halving what both have would be better, here or with heavier ranks
            ours = blocks[starts[heavy] : starts[heavy + 1]]
            theirs = blocks[starts[rank] : starts[rank + 1]]
            heavier, our_block, their_block = _best_pair(
                work, ours, theirs, loads[heavy], loads[rank], num_blanks
            )
            if heavier < best:
                best, give, take, other = heavier, our_block, their_block, rank
        if other < 0:
            return
        owners[give] = other
        loads[heavy] -= work[give]
        loads[other] += work[give]
        if take >= 0:
            owners[take] = heavy
            loads[heavy] += work[take]
            loads[other] -= work[take]


@compiled
def _group(
    owners: NDArray[np.int32], order: NDArray[np.int32], starts: NDArray[np.int64], blocks: NDArray[np.int32]
) -> None:
    """Group blocks by rank, in the given order; starts [G + 1] is where each rank's blocks begin."""
    starts[:] = 0
    for owner in owners:
        starts[owner + 1] += 1
    for rank in range(starts.size - 1):
        starts[rank + 1] += starts[rank]
    for block in order:
        blocks[starts[owners[block]]] = block
        starts[owners[block]] += 1
    for rank in range(starts.size - 1, 0, -1):
        starts[rank] = starts[rank - 1]
    starts[0] = 0


@compiled
def _best_pair(
    work: NDArray[np.int64],
    ours: NDArray[np.int32],
    theirs: NDArray[np.int32],
    our_load: int,
    their_load: int,
    num_blanks: int,
) -> tuple[int, int, int]:
    """Return (load of the heavier of both afterwards, block to give, block to take or -1).

    Half the difference of the loads would make both even. Both lists fall, so the block that comes
    closest to it moves in one direction only.
    """
    best, give, take = our_load, -1, -1
    index = 0
    last = theirs.size - 1 + num_blanks  # the index after the last block is a blank: nothing in return
    for our_block in ours:
        while index < last and _after(work, our_block, theirs, index, our_load, their_load) > 0:
            index += 1
        for candidate in range(max(index - 1, 0), min(index, last) + 1):
            taken = work[theirs[candidate]] if candidate < theirs.size else 0
            heavier = max(our_load - work[our_block] + taken, their_load + work[our_block] - taken)
            if heavier < best:
                best, give = heavier, our_block
                take = theirs[candidate] if candidate < theirs.size else -1
    return best, give, take


@compiled
def _after(
    work: NDArray[np.int64],
    our_block: int,
    theirs: NDArray[np.int32],
    index: int,
    our_load: int,
    their_load: int,
) -> int:
    """Return how much heavier our rank than theirs is after the exchange; falls along their list."""
    taken = work[theirs[index]] if index < theirs.size else 0
    heavier: int = our_load - their_load - 2 * (work[our_block] - taken)
    return heavier
