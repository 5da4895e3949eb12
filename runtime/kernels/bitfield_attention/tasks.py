"""Work items of one launch: lists in longest-first order, long ones split where that pays.

Pure numbers on the host. The grid hands out tasks in order, so the hardware's dispatcher is a
greedy list scheduler (Graham 1969); a list longer than the mean load of a slot bounds the launch,
and only splitting it helps. That happens where one launch has few heads or few query blocks, as
on one context-parallel rank.
"""

import heapq
from dataclasses import dataclass
from enum import Enum

import numpy as np

MOST_PIECES = 64
WORTH_SIMULATING = 0.05  # of the launch: no splitting can gain more than the longest list's share
WORTH_SPLITTING = 0.97  # of the unsplit launch


class Split(Enum):
    """Whether long lists are cut into pieces that run side by side."""

    NEVER = "never"
    WHERE_IT_PAYS = "where it pays"


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """Cut every list after each `num_tiles` tiles, whatever it costs: the published scheme's ablation."""

    num_tiles: int

    def __post_init__(self) -> None:
        if self.num_tiles < 1:
            raise ValueError(f"num_tiles must be >= 1, got {self.num_tiles}")


@dataclass(frozen=True, slots=True)
class TaskCost:
    """Assumed costs, in units of one FULL tile of 128 x 128 at head width 128.

    On a GPU of 3 TFLOP/s and 36 GB/s of memory rate per multiprocessor such a tile takes about
    2.8 us. These are assumptions, not measurements: `partial` is the mask test on top of the two
    products, `task` the load of the block and the store of its output, `piece` writing a float32
    partial result (64 KB), `combine` one more launch, `gather` reading one partial result back.
    """

    full: float = 1.0
    partial: float = 1.35
    task: float = 1.5
    piece: float = 0.65
    combine: float = 1.5
    gather: float = 0.65


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Task t walks entries [begin[t], end[t]) of the list of block[t]; all [num tasks] int32.

    `slot[t]` is where its partial result goes, or -1 if it has the list to itself and writes the
    output. Split block s is `split_block[s]`, with slots [split_start[s], split_start[s + 1]).
    """

    block: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    slot: np.ndarray
    split_block: np.ndarray
    split_start: np.ndarray

    @property
    def num_slots(self) -> int:
        return int(self.split_start[-1])


def make_tasks(
    num_full: np.ndarray,
    num_partial: np.ndarray,
    *,
    num_heads: int,
    num_slots: int,
    split: Split | FixedSplit,
    cost: TaskCost | None = None,
) -> Tasks:
    """Task table of one launch.

    Args:
        num_full, num_partial: [L] tiles in each block's list; FULL ones come first.
        num_heads: how often the whole table runs, side by side.
        num_slots: tasks that run at once (multiprocessors x resident blocks).
        split: policy.
        cost: assumptions.

    Ties in the order go to the lower block. An empty list is a task too: somebody must write zeros.
    Complexity: O(L log L); where splitting is weighed, O(pieces heads log slots) for each of four cuts.
    """
    cost = cost or TaskCost()
    pieces = _pieces(num_full, num_partial, num_heads, num_slots, split, cost)
    return _table(num_full, num_partial, pieces, cost)


def modelled_span(
    num_full: np.ndarray,
    num_partial: np.ndarray,
    *,
    num_heads: int,
    num_slots: int,
    split: Split | FixedSplit,
    cost: TaskCost | None = None,
) -> float:
    """Time of that launch by list scheduling, in units of a FULL tile; arguments as for `make_tasks`."""
    cost = cost or TaskCost()
    pieces = _pieces(num_full, num_partial, num_heads, num_slots, split, cost)
    length = cost.full * num_full + cost.partial * num_partial
    return _makespan(length, pieces, num_heads, num_slots, cost)


def _pieces(
    num_full: np.ndarray,
    num_partial: np.ndarray,
    num_heads: int,
    num_slots: int,
    split: Split | FixedSplit,
    cost: TaskCost,
) -> np.ndarray:
    """[L] into how many pieces each list is cut."""
    if isinstance(split, FixedSplit):
        return np.maximum(1, -(-(num_full + num_partial) // split.num_tiles))
    if split is Split.NEVER:
        return np.ones(len(num_full), dtype=np.int64)
    return _pieces_that_pay(num_full, num_partial, num_heads, num_slots, cost)


def _pieces_that_pay(
    num_full: np.ndarray, num_partial: np.ndarray, num_heads: int, num_slots: int, cost: TaskCost
) -> np.ndarray:
    """[L] pieces of every list: the best of a few cuts by list scheduling, 1 unless clearly better."""
    whole = np.ones(len(num_full), dtype=np.int64)
    length = cost.full * num_full + cost.partial * num_partial
    mean = (length + cost.task).sum() * num_heads / num_slots
    if not length.size or length.max() <= WORTH_SIMULATING * mean:
        return whole
    best, best_span = whole, WORTH_SPLITTING * _makespan(length, whole, num_heads, num_slots, cost)
    for fraction in (1, 2, 4, 8):
        target = max(mean / fraction, 2 * cost.task)
        cut = np.minimum(np.ceil(length / target), np.minimum(num_full + num_partial, MOST_PIECES))
        pieces = np.where(length > 1.25 * target, cut, 1).astype(np.int64)
        span = _makespan(length, pieces, num_heads, num_slots, cost)
        if span < best_span:
            best, best_span = pieces, span
    return best


def _makespan(
    length: np.ndarray, pieces: np.ndarray, num_heads: int, num_slots: int, cost: TaskCost
) -> float:
    """Time of a launch and its combine: longest first, each to the slot that is free first."""
    split = pieces > 1
    each = length / pieces + cost.task + cost.piece * split
    jobs = np.sort(np.repeat(each, pieces * num_heads))[::-1].tolist()
    free = [0.0] * min(num_slots, len(jobs))
    for job in jobs:
        heapq.heapreplace(free, free[0] + job)
    if not split.any():
        return max(free)
    gathered = int(pieces[split].sum()) * num_heads * cost.gather / num_slots
    return max(free) + cost.combine + gathered


def _table(num_full: np.ndarray, num_partial: np.ndarray, pieces: np.ndarray, cost: TaskCost) -> Tasks:
    block = np.repeat(np.arange(len(pieces)), pieces)
    first = np.cumsum(pieces) - pieces
    piece = np.arange(len(block)) - np.repeat(first, pieces)
    full, partial, of = num_full[block], num_partial[block], pieces[block]
    begin = _cut(full, partial, piece / of, cost)
    end = _cut(full, partial, (piece + 1) / of, cost)
    split_block = np.flatnonzero(pieces > 1)
    split_start = np.concatenate([[0], np.cumsum(pieces[split_block])])
    slot = np.full(len(block), -1)
    slot[of > 1] = np.arange(split_start[-1])
    in_full = np.minimum(end, full) - np.minimum(begin, full)
    weight = cost.full * in_full + cost.partial * (end - begin - in_full)
    order = np.argsort(-weight, kind="stable")
    columns = (block[order], begin[order], end[order], slot[order], split_block, split_start)
    return Tasks(*(column.astype(np.int32) for column in columns))


def _cut(full: np.ndarray, partial: np.ndarray, fraction: np.ndarray, cost: TaskCost) -> np.ndarray:
    """Entry of a list at which that fraction of its cost lies behind; the ends are exact."""
    in_full = cost.full * full
    wanted = fraction * (in_full + cost.partial * partial)
    entry = np.where(wanted <= in_full, wanted / cost.full, full + (wanted - in_full) / cost.partial)
    return np.where(fraction >= 1, full + partial, np.floor(entry)).astype(np.int64)
