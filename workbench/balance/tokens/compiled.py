"""The compiled hot paths of token distribution: a radix order, and a tree that knows the lightest rank."""

import numpy as np
from numpy.typing import NDArray

from workbench.compiled import compiled

DIGIT_BITS = 11
NUM_DIGITS = 1 << DIGIT_BITS


CLOSED = np.iinfo(np.int64).max


@compiled
def descending_order(work: NDArray[np.int64]) -> NDArray[np.int32]:
    """[B] indices from the largest to the smallest, equal ones in their order; work must be >= 0.

    A radix sort of 11 bits per pass: O(passes x B), in place of a stable `np.argsort(-work)`. Passes
    above the largest number, and those in which all digits agree, are skipped.
    """
    order, other = np.arange(work.size).astype(np.int32), np.empty(work.size, np.int32)
    starts = np.empty(NUM_DIGITS + 1, np.int64)
    largest, last = work.max(), NUM_DIGITS - 1
    shift = 0
    while shift < 63 and largest >> shift:
        starts[:] = 0
        for amount in work:
            starts[last - ((amount >> shift) & last) + 1] += 1
        if starts.max() < work.size:
            for digit in range(NUM_DIGITS):
                starts[digit + 1] += starts[digit]
            for index in order:
                digit = last - ((work[index] >> shift) & last)
                other[starts[digit]] = index
                starts[digit] += 1
            order, other = other, order
        shift += DIGIT_BITS
    return order


@compiled
def assign_in_order(
    work: NDArray[np.int64], order: NDArray[np.int32], num_ranks: int, num_each: int, num_with_one_more: int
) -> NDArray[np.int32]:
    """Assign each block of the order to the lightest open rank, ties to the lower rank.

    Ranks hold `num_each` blocks at most, and `num_with_one_more` of them, those that need it first,
    one more. A tree in place of a heap: every node holds the lightest rank below it as
    load x 2**bits + rank, so a block costs log2(num_ranks) minima and no branches, in place of
    comparisons that no processor can predict. The sum of work must be below 2**(63 - bits).
    """
    bits = 0
    while 1 << bits < num_ranks:
        bits += 1
    width = 1 << bits
    counts = np.zeros(num_ranks, np.int64)
    lightest = np.full(2 * width, CLOSED)
    lightest[width : width + num_ranks] = np.arange(num_ranks)
    for node in range(width - 1, 0, -1):
        lightest[node] = min(lightest[2 * node], lightest[2 * node + 1])
    owners = np.empty(work.size, np.int32)
    for block in order:
        entry = lightest[1]
        rank = entry & (width - 1)
        owners[block] = rank
        counts[rank] += 1
        entry += work[block] << bits
        if counts[rank] > num_each:
            num_with_one_more -= 1
            if num_with_one_more == 0:
                _close_full(lightest, counts, num_each)
        if counts[rank] > num_each or (counts[rank] == num_each and num_with_one_more == 0):
            entry = CLOSED
        _enter(lightest, width + rank, entry)
    return owners


@compiled
def _enter(lightest: NDArray[np.int64], leaf: int, entry: int) -> None:
    """Set a leaf's entry and update minima up to the root."""
    lightest[leaf] = entry
    node = leaf
    while node > 1:
        entry = min(entry, lightest[node ^ 1])
        node >>= 1
        lightest[node] = entry


@compiled
def _close_full(lightest: NDArray[np.int64], counts: NDArray[np.int64], num_each: int) -> None:
    for rank in range(counts.size):
        if counts[rank] >= num_each:
            _enter(lightest, lightest.size // 2 + rank, CLOSED)
