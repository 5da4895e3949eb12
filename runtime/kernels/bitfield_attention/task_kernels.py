"""Triton kernels that make a task table: they weigh cuts, cut lists and put the pieces in order.

All costs are whole numbers, in twentieths of a FULL tile of 128 x 128 at head width 128, so a cut is the
same wherever it is computed. On a GPU of 3 TFLOP/s and 36 GB/s of memory rate per multiprocessor such a
tile takes about 2.8 us. These are assumptions, not measurements: PARTIAL is the mask test on top of the
two products, TASK the load of the block and the store of its output, PIECE writing a float32 partial
result (64 KB), COMBINE one more launch, GATHER reading one partial result back.
"""

import triton
import triton.language as tl

# In kernels: I, J = CHUNK blocks of one side, P = PIECES pieces of a list.

FULL = tl.constexpr(20)
PARTIAL = tl.constexpr(27)
TASK = tl.constexpr(30)
PIECE = tl.constexpr(13)
COMBINE = tl.constexpr(30)
GATHER = tl.constexpr(13)
MOST_PIECES = tl.constexpr(64)
SHORTEST = tl.constexpr(60)  # a piece, twice a task's own cost
CUTS = tl.constexpr(4)  # that are weighed: none, and pieces of a mean load, of 1/2 and of 1/4 of it
WORTH = tl.constexpr(0.97)  # of the unsplit launch
COUNTS = ("num_blocks", "repeat", "num_heads", "num_slots", "num_tiles", "num_tasks", "num_splits")


@triton.jit
def _lists(num_full, num_partial, at, num_blocks, repeat):
    """FULL and PARTIAL tiles of some lists, as often as a task walks them; none past the last list."""
    full = tl.load(num_full + at, mask=at < num_blocks, other=0) * repeat
    return full, tl.load(num_partial + at, mask=at < num_blocks, other=0) * repeat


@triton.jit
def _load(num_full, num_partial, num_blocks, repeat, num_heads, CHUNK: tl.constexpr):
    """Cost of all lists of all heads, uncut."""
    cost = tl.zeros([CHUNK], tl.int64)
    for begin in range(0, num_blocks, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        full, partial = _lists(num_full, num_partial, at, num_blocks, repeat)
        cost += tl.where(at < num_blocks, full.to(tl.int64) * FULL + partial * PARTIAL + TASK, 0)
    return tl.sum(cost, 0) * num_heads


@triton.jit
def _pieces(full, partial, load, num_slots, cut):
    """Into how many pieces the cut of that number takes lists; hardly longer than a piece stays whole."""
    length = full.to(tl.int64) * FULL + partial * PARTIAL
    slots = num_slots << tl.maximum(cut - 1, 0)
    size = tl.maximum((load + slots - 1) // slots, SHORTEST)
    pieces = tl.minimum(tl.minimum((length + size - 1) // size, full + partial), MOST_PIECES)
    return tl.where((cut > 0) & (4 * length > 5 * size), pieces, 1).to(tl.int32)


@triton.jit
def _each(full, partial, pieces):
    """Cost of every piece of a list, roughly."""
    length = (full.to(tl.int64) * FULL + partial * PARTIAL).to(tl.float32)
    return length / pieces.to(tl.float32) + TASK + tl.where(pieces > 1, PIECE, 0)


@triton.jit(do_not_specialize=COUNTS)
def weigh_kernel(num_full, num_partial, spans, num_blocks, repeat, num_heads, num_slots, CHUNK: tl.constexpr):
    """One program: the time below which no launch and combine come under one cut, as CHUNK lists show.

    No order of tasks beats the mean load of a slot; nor, for every k, k + 1 times the length of a task that
    (k slots) others are at least as long as, since two of these share a slot. Longest first comes close to
    the larger of these (Graham 1969), so it is what cuts are compared by.
    """
    cut = tl.program_id(1)
    load = _load(num_full, num_partial, num_blocks, repeat, num_heads, CHUNK)
    at_I = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    full, partial = _lists(num_full, num_partial, at_I, num_blocks, repeat)
    each_I = _each(full, partial, _pieces(full, partial, load, num_slots, cut))
    longer_I = tl.zeros([CHUNK], tl.int64)
    work_J = tl.zeros([CHUNK], tl.float32)
    gathered_J = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, num_blocks, CHUNK):
        at_J = begin + tl.arange(0, CHUNK)
        full, partial = _lists(num_full, num_partial, at_J, num_blocks, repeat)
        pieces_J = _pieces(full, partial, load, num_slots, cut)
        each_J = _each(full, partial, pieces_J)
        pieces_J = tl.where(at_J < num_blocks, pieces_J, 0)
        longer_I += tl.sum(tl.where(each_J[None, :] >= each_I[:, None], pieces_J[None, :], 0), 1)
        work_J += each_J * pieces_J
        gathered_J += tl.where(pieces_J > 1, pieces_J, 0)
    turns_I = (longer_I * num_heads + num_slots - 1) // num_slots
    bound_I = tl.where(at_I < num_blocks, turns_I.to(tl.float32) * each_I, 0.0)
    share = 1.0 * num_heads / num_slots
    gathered = tl.sum(gathered_J, 0)
    span = tl.maximum(tl.max(bound_I, 0), tl.sum(work_J, 0) * share)
    span += tl.where(gathered > 0, gathered.to(tl.float32) * GATHER * share + COMBINE, 0.0)
    tl.store(spans + cut * tl.num_programs(0) + tl.program_id(0), span)


@triton.jit
def _best_cut(spans, num_chunks, CHUNK: tl.constexpr):
    """The cut of the least time; none unless another is clearly better."""
    best, least = 0, float("inf")
    for cut in tl.static_range(CUTS):
        span_J = tl.zeros([CHUNK], tl.float32)
        for begin in range(0, num_chunks, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            span_J = tl.maximum(
                span_J, tl.load(spans + cut * num_chunks + at, mask=at < num_chunks, other=0.0)
            )
        span = tl.max(span_J, 0) * (WORTH if cut == 0 else 1.0)
        best = tl.where(span < least, cut, best)
        least = tl.minimum(span, least)
    return best


@triton.jit
def _entry(full, partial, piece, pieces):
    """Entry of a list at which that many of its pieces lie behind."""
    in_full = full.to(tl.int64) * FULL
    wanted = (in_full + partial * PARTIAL) * piece // pieces
    inside = full + (wanted - in_full) // PARTIAL
    return tl.where(wanted <= in_full, wanted // FULL, inside).to(tl.int32)


@triton.jit(do_not_specialize=COUNTS)
def cut_kernel(
    num_full,
    num_partial,
    spans,
    pieces_out,
    split_block,
    split_start,
    num_blocks,
    repeat,
    num_heads,
    num_slots,
    num_tiles,
    num_tasks,
    num_splits,
    WHERE_IT_PAYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: the pieces of one list, behind those of the lists before it; the last one fills the room.

    Rows of `pieces_out`: block, begin, end, slot, weight. Lists are cut where it pays, or after `num_tiles`.
    """
    block = tl.program_id(0)
    if WHERE_IT_PAYS:
        cut = _best_cut(spans, tl.cdiv(num_blocks, CHUNK), CHUNK)
        load = _load(num_full, num_partial, num_blocks, repeat, num_heads, CHUNK)
    task, slot, split, pieces = 0, 0, 0, 0
    for begin in range(0, num_blocks, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        full, partial = _lists(num_full, num_partial, at, num_blocks, repeat)
        if WHERE_IT_PAYS:
            found = _pieces(full, partial, load, num_slots, cut)
        else:
            found = tl.maximum((full + partial - 1) // num_tiles + 1, 1)
        found = tl.where(at < num_blocks, found, 0)
        pieces += tl.sum(tl.where(at == block, found, 0), 0)
        found = tl.where(at < block, found, 0)
        task += tl.sum(found, 0)
        slot += tl.sum(tl.where(found > 1, found, 0), 0)
        split += tl.sum((found > 1).to(tl.int32), 0)
    full, partial = _lists(num_full, num_partial, block, num_blocks, repeat)
    is_split = pieces > 1
    if block == num_blocks:
        pieces = num_tasks - task
        for empty in range(split, num_splits):
            tl.store(split_block + empty, num_blocks)
            tl.store(split_start + empty, slot)
        tl.store(split_start + num_splits, slot)
    if is_split:
        tl.store(split_block + split, block)
        tl.store(split_start + split, slot)
    for first in range(0, pieces, CHUNK):
        piece = first + tl.arange(0, CHUNK)
        start = _entry(full, partial, piece, pieces)
        end = _entry(full, partial, piece + 1, pieces)
        in_full = tl.minimum(end, full) - tl.minimum(start, full)
        weight = in_full * FULL + (end - start - in_full) * PARTIAL
        out, inside = pieces_out + task + piece, piece < pieces
        tl.store(out, tl.zeros([CHUNK], tl.int32) + block, mask=inside)
        tl.store(out + num_tasks, start, mask=inside)
        tl.store(out + 2 * num_tasks, end, mask=inside)
        tl.store(out + 3 * num_tasks, tl.where(is_split, slot + piece, -1), mask=inside)
        tl.store(out + 4 * num_tasks, tl.where(block < num_blocks, weight, -1), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def order_kernel(pieces, tasks, num_tasks, CHUNK: tl.constexpr):
    """One program: CHUNK pieces to their places, longest first; equal ones stay in order."""
    mine = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = mine < num_tasks
    weights = pieces + 4 * num_tasks
    weight = tl.load(weights + mine, mask=inside, other=0)
    index = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, num_tasks, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        theirs = tl.load(weights + other, mask=other < num_tasks, other=-2)
        ahead = (theirs[None, :] > weight[:, None]) | (
            (theirs[None, :] == weight[:, None]) & (other[None, :] < mine[:, None])
        )
        index += tl.sum(ahead.to(tl.int32), 1)
    for row in tl.static_range(4):
        value = tl.load(pieces + row * num_tasks + mine, mask=inside, other=0)
        tl.store(tasks + row * num_tasks + index, value, mask=inside)
