"""Policies: which context-parallel rank owns which block of tokens.

A policy takes the work of every block and a number of ranks and returns the owner of every block.
Work may be tiles, query-key pairs or seconds. Whole numbers are added exactly; others are counted in a
power of two of which at least 2**44 make up the total, so that no sum depends on its order.
Policies that look at positions alone use nothing but the number of blocks. None of them moves tokens:
blocks keep their order, and a rank holds its blocks in ascending order.
"""

from collections.abc import Callable
from math import isfinite
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.balance.tokens.compiled import assign_in_order, descending_order

Owners = NDArray[np.int32]
Loads = NDArray[np.int64] | NDArray[np.float64]
Policy = Callable[[ArrayLike, int], Owners]


def longest_first(work: ArrayLike, num_ranks: int) -> Owners:
    """Assign longest processing time first: the heaviest remaining block goes to the lightest rank.

    Cornstarch v1 Algorithm 2 (ICML section 3.2.1); Graham 1969, "Bounds on Multiprocessing Timing
    Anomalies", SIAM J. Appl. Math. 17(2): the heaviest rank has at most 4/3 - 1/(3 num_ranks)
    times the least possible. Token counts per rank are not balanced.

    Args:
        work: [B] work of each block, finite and >= 0.
        num_ranks: G.

    Returns:
        int32 [B] owner of each block, 0..G-1. Equal blocks are taken in their order, equal ranks
        from the lowest, so equal input always gives the same owners.

    Raises:
        ValueError: no blocks, G < 1, work that is negative, not finite, or too much to be added up.

    Complexity: O(B log G) after a radix sort.
    """
    units = whole_units(work, num_ranks)
    return assign_in_order(units, descending_order(units), num_ranks, units.size, 0)


def longest_first_unsorted(work: ArrayLike, num_ranks: int) -> Owners:
    """Assign blocks in their order, each to the lightest rank: Cornstarch (ICML) Algorithm 1 as printed.

    The algorithm is called longest processing time first and prints no sort. This is Graham 1966's
    list scheduling, at most 2 - 1/G times the least possible. Arguments and errors: `longest_first`.

    Complexity: O(B log G).
    """
    units = whole_units(work, num_ranks)
    return assign_in_order(units, np.arange(units.size, dtype=np.int32), num_ranks, units.size, 0)


def longest_first_equal_counts(work: ArrayLike, num_ranks: int) -> Owners:
    """Assign by `longest_first` among ranks that still have room: block counts differ by at most one.

    Collectives of equal sizes, and layers that cost the same per token, need equal token counts.
    A rank is full with floor(B / G) blocks, and the first B mod G ranks to need it with one more.
    Arguments and errors: `longest_first`.

    Complexity: O(B log G) after a radix sort.
    """
    units = whole_units(work, num_ranks)
    num_each, num_with_one_more = divmod(units.size, num_ranks)
    return assign_in_order(units, descending_order(units), num_ranks, num_each, num_with_one_more)


def sorted_round_robin(work: ArrayLike, num_ranks: int) -> Owners:
    """Assign blocks from heaviest to lightest to the ranks back and forth: equal block counts.

    What PyTorch's context parallelism calls processing-time-based round robin (`_PTRRLoadBalancer`).
    Differs: PyTorch wants a multiple of G blocks; here the last round may be incomplete and is assigned
    in its direction. Arguments and errors: `longest_first`.

    Complexity: O(B) after a radix sort.
    """
    units = whole_units(work, num_ranks)
    turn, index = np.divmod(np.arange(units.size, dtype=np.int32), np.int32(num_ranks))
    owners = np.empty(units.size, np.int32)
    owners[descending_order(units)] = np.where(turn % 2 == 0, index, num_ranks - 1 - index)
    return owners


def contiguous(work: ArrayLike, num_ranks: int) -> Owners:
    """Assign rank 0 the first run of blocks, rank 1 the next: naive ring attention.

    Runs differ by one block at most, the longer ones first. Arguments and errors: `longest_first`.
    """
    return _runs(checked_work(work, num_ranks).size, num_ranks)


def zigzag(work: ArrayLike, num_ranks: int) -> Owners:
    """Assign rank r the r-th from the front and the r-th from the back of 2 G runs of blocks.

    Balances plain causal attention (Llama 3 section 3.3.2, PyTorch's `_HeadTailLoadBalancer`). Runs
    differ by one block at most, the longer ones first. Arguments and errors: `longest_first`.
    """
    runs = _runs(checked_work(work, num_ranks).size, 2 * num_ranks)
    owners: Owners = np.minimum(runs, np.int32(2 * num_ranks - 1) - runs)
    return owners


def stripe(work: ArrayLike, num_ranks: int) -> Owners:
    """Assign block b to rank b mod G: striped attention, in blocks.

    Brandon et al. 2023, "Striped Attention". Arguments and errors: `longest_first`.
    """
    owners: Owners = np.arange(checked_work(work, num_ranks).size, dtype=np.int32) % np.int32(num_ranks)
    return owners


def random_blocks(work: ArrayLike, num_ranks: int, *, seed: int) -> Owners:
    """Assign every block to a rank drawn at random, independently: Cornstarch v1 section 5.3.

    `experiments.bench.token_bounds.random_bound` says how far from even that may be. Arguments and errors:
    `longest_first`; the same seed gives the same owners.
    """
    size = checked_work(work, num_ranks).size
    drawn: Owners = np.random.default_rng(seed).integers(num_ranks, size=size, dtype=np.int32)
    return drawn


def block_sizes(num_tokens: int, block_tokens: int) -> NDArray[np.int64]:
    """[B] tokens of each block; ValueError for less than one token per sequence or block."""
    if num_tokens < 1 or block_tokens < 1:
        raise ValueError(
            f"want at least one token and one token per block, got {num_tokens} and {block_tokens}"
        )
    sizes = np.full(-(-num_tokens // block_tokens), block_tokens, np.int64)
    sizes[-1] = num_tokens - block_tokens * (sizes.size - 1)
    return sizes


def rank_loads(work: ArrayLike, owners: ArrayLike, num_ranks: int) -> Loads:
    """[G] work of each rank, in the number type of the given work.

    Raises:
        ValueError: errors of `checked_owners` and of `longest_first`.
    """
    loads = checked_work(work, num_ranks)
    total = np.zeros_like(loads, shape=num_ranks)
    np.add.at(total, checked_owners(owners, loads.size, num_ranks), loads)
    return cast(Loads, total)


def checked_owners(owners: ArrayLike, num_blocks: int, num_ranks: int) -> Owners:
    """Return a copy of the owners as int32 [B]; ValueError where one is missing or is no rank."""
    owned = np.asarray(owners)
    if owned.shape != (num_blocks,):
        raise ValueError(f"want one owner for each of {num_blocks} blocks, got shape {owned.shape}")
    if owned.dtype.kind not in "iu":
        raise ValueError(f"owners must be whole numbers, got {owned.dtype}")
    if owned.min() < 0 or owned.max() >= num_ranks:
        raise ValueError(f"owners must be in 0..{num_ranks - 1}, got {owned.min()}..{owned.max()}")
    return owned.astype(np.int32)


def max_over_mean(work: ArrayLike, owners: ArrayLike, num_ranks: int) -> float:
    """Return the heaviest rank's work over the mean; 1.0 if balanced, and where there is no work."""
    loads = rank_loads(work, owners, num_ranks)
    total = float(loads.sum())
    return float(loads.max()) * num_ranks / total if total else 1.0


def whole_units(work: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """[B] the work as whole numbers: itself, or multiples of a power of two.

    Raises:
        ValueError: whole numbers whose sum, times the ranks, is no int64; errors of `longest_first`.
    """
    loads = checked_work(work, num_ranks)
    bits = (num_ranks - 1).bit_length()
    total = loads.sum()
    if loads.dtype.kind == "f":
        exponent = int(np.frexp(total)[1])  # the total is below 2**exponent
        return np.rint(np.ldexp(loads, 61 - bits - exponent)).astype(np.int64)
    if total >= 2 ** (62 - bits):
        raise ValueError(f"work for {num_ranks} ranks must add up to less than 2**{62 - bits}, got {total}")
    return loads.astype(np.int64, copy=False)


def checked_work(work: ArrayLike, num_ranks: int) -> Loads:
    """Return the work as int64 or float64 [B], after the checks that all policies make."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be >= 1, got {num_ranks}")
    array = np.asarray(work)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"work must be a list of at least one block, got shape {array.shape}")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"work must be numbers, got {array.dtype}")
    largest, least = float(array.max()), float(array.min())
    if not (least >= 0 and isfinite(largest)):
        raise ValueError(f"work must be finite and >= 0 for every block, got {least}..{largest}")
    if array.dtype.kind == "f":
        if not isfinite(largest * array.size):
            raise ValueError(f"work must have a finite sum, got {array.size} blocks of up to {largest:.3g}")
        return array.astype(np.float64) + 0.0  # a negative zero becomes zero
    total = float(array.sum(dtype=np.float64))
    if total >= 2**62:
        raise ValueError(f"work must add up to less than 2**62, got {total:.3g}")
    return array.astype(np.int64)


def _runs(num_blocks: int, num_runs: int) -> Owners:
    """[B] which of the runs each block is in."""
    length, num_longer = divmod(num_blocks, num_runs)
    lengths = np.full(num_runs, length, np.int64)
    lengths[:num_longer] += 1
    return np.repeat(np.arange(num_runs, dtype=np.int32), lengths)
