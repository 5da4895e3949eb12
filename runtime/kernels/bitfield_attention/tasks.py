"""Work items of one launch: lists in longest-first order, long ones split where that pays.

Computed where the counts of tiles are; nothing is read back, so the table has room for every cut that
may be chosen, and tasks of no block fill what is left. The grid hands out tasks in order, so the
hardware's dispatcher is a greedy list scheduler (Graham 1969); a list longer than the mean load of a
slot bounds the launch, and only splitting it helps. That happens where one launch has few heads or few
query blocks, as on one context-parallel rank.
"""

import heapq
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.task_kernels import (
    COMBINE,
    CUTS,
    FULL,
    GATHER,
    MOST_PIECES,
    PARTIAL,
    PIECE,
    TASK,
    cut_kernel,
    order_kernel,
    weigh_kernel,
)

# Shape suffixes: L = blocks of one side, T = tasks, S = split blocks.

FINEST = 1 << CUTS.value - 2  # pieces are no shorter than this part of the mean load
SPLIT_FROM = 1.25  # times the length of a piece: a list that is hardly longer stays whole
CHUNK = 64
NEVER_CUT = 2**31 - 1  # tiles


class Split(Enum):
    """Whether long lists are cut into pieces that run side by side."""

    NEVER = "never"
    WHERE_IT_PAYS = "where it pays"


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """Cut every list after each `num_tiles` tiles, whatever it costs: the published scheme's ablation.

    How many pieces that makes is read back to the host, once for a plan and launch shape.
    """

    num_tiles: int

    def __post_init__(self) -> None:
        if self.num_tiles < 1:
            raise ValueError(f"num_tiles must be >= 1, got {self.num_tiles}")


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Task t walks entries [begin, end) of the list of its block.

    Its slot is where its partial result goes, or -1 if it has the list to itself and writes the output.
    Split block s is `split_block[s]`, with slots [split_start[s], split_start[s + 1]). Tasks and split
    blocks that are only room are of block L, the one past the last, and have no entry.

    Args:
        table: [4, T] int32: block, begin, end, slot.
        split_block: [S] int32.
        split_start: [S + 1] int32.
        num_slots: partial results that there is room for.
    """

    table: Tensor
    split_block: Tensor
    split_start: Tensor
    num_slots: int

    @property
    def num_tasks(self) -> int:
        return self.table.shape[1]


@dataclass(frozen=True, slots=True)
class _Room:
    """Sizes of a table: tasks, split blocks, partial results."""

    tasks: int
    splits: int
    slots: int


def make_tasks(
    num_full: Tensor,
    num_partial: Tensor,
    *,
    num_heads: int,
    num_slots: int,
    split: Split | FixedSplit,
    repeat: int = 1,
) -> Tasks:
    """Task table of one launch, on the device of the counts.

    Args:
        num_full, num_partial: [L] int32 tiles in each block's list; FULL ones come first.
        num_heads: how often the whole table runs, side by side.
        num_slots: tasks that run at once (multiprocessors x resident blocks).
        split: policy.
        repeat: how often a task walks its list.

    Ties in the order go to the lower block. An empty list is a task too: somebody must write zeros.
    At most three launches; the host waits only for a fixed split. Complexity: O(L^2 + T^2), spread over
    L and T / CHUNK programs.
    """
    num_blocks, device = len(num_full), num_full.device
    room, num_tiles = _room(num_blocks, num_heads, num_slots), NEVER_CUT
    if isinstance(split, FixedSplit):
        num_tiles = split.num_tiles
        room = _room_of_fixed((num_full + num_partial) * repeat, num_tiles)
    elif split is Split.NEVER:
        room = _Room(num_blocks, 0, 0)

    def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    num_chunks = -(-num_blocks // CHUNK)
    made = Tasks(table(4, room.tasks), table(room.splits), table(room.splits + 1), room.slots)
    spans, pieces = table(CUTS.value, num_chunks, dtype=torch.float32), table(5, room.tasks)
    sizes = (num_blocks, repeat, num_heads, num_slots)
    where_it_pays = split is Split.WHERE_IT_PAYS and room.slots > 0
    if where_it_pays:
        weigh_kernel[(num_chunks, CUTS.value)](num_full, num_partial, spans, *sizes, CHUNK=CHUNK)
    cut_kernel[(num_blocks + 1,)](
        num_full,
        num_partial,
        spans,
        pieces,
        made.split_block,
        made.split_start,
        *sizes,
        num_tiles,
        room.tasks,
        room.splits,
        WHERE_IT_PAYS=where_it_pays,
        CHUNK=CHUNK,
    )
    if room.tasks:
        order_kernel[(-(-room.tasks // CHUNK),)](pieces, made.table, room.tasks, CHUNK=CHUNK)
    return made


def _room(num_blocks: int, num_heads: int, num_slots: int) -> _Room:
    """What the finest cut may need, whatever the lists; none where one slot takes all tasks.

    A piece is no shorter than p, 1 / FINEST of the mean load of a slot, so all lists together are at most
    e = FINEST slots / heads times p. A list of x p is cut for x > SPLIT_FROM into ceil(x) pieces, which
    are less than x more than one, and at most 2 / SPLIT_FROM x.
    """
    most = FINEST * num_slots / num_heads if num_slots > 1 else 0.0
    splits = min(num_blocks, int(most / SPLIT_FROM))
    slots = min(splits * MOST_PIECES.value, int(most * 2 / SPLIT_FROM))
    return _Room(num_blocks + min(int(most), slots), splits, slots)


def _room_of_fixed(count_L: Tensor, num_tiles: int) -> _Room:
    pieces_L = (-(-count_L // num_tiles)).clamp(min=1)
    cut_L = pieces_L > 1
    return _Room(*torch.stack([pieces_L.sum(), cut_L.sum(), (pieces_L * cut_L).sum()]).tolist())


def modelled_span(
    tasks: Tasks, num_full: Tensor, num_partial: Tensor, *, num_heads: int, num_slots: int
) -> float:
    """Time of a launch and its combine by list scheduling, in units of a FULL tile; reads the table back.

    Longest first, each task to the slot that is free first. Complexity: O(tasks heads log slots).
    """
    full, jobs, gathered = num_full.tolist(), [], 0
    for block, begin, end, slot in tasks.table.T.tolist():
        if block < len(full):
            in_full = min(end, full[block]) - min(begin, full[block])
            cost = FULL.value * in_full + PARTIAL.value * (end - begin - in_full) + TASK.value
            jobs.append(cost + (PIECE.value if slot >= 0 else 0))
            gathered += slot >= 0
    jobs = sorted(jobs * num_heads, reverse=True)
    free = [0.0] * min(num_slots, len(jobs))
    for job in jobs:
        heapq.heapreplace(free, free[0] + job)
    span = max(free, default=0.0)
    if gathered:
        span += COMBINE.value + gathered * num_heads * GATHER.value / num_slots
    return span / FULL.value
