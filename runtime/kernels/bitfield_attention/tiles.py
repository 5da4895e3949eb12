"""Which tiles of a mask hold work, exactly, and their lists: a few kernels on the mask's own device.

Nothing is read back to the host and every size follows from the number of tokens alone, so a plan can
be made anew for every step, also within a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.bitfield_attention.mask import KernelMask

# Shape suffixes: R = query blocks, C = key blocks, L = blocks of one side.
# In kernels: Q = BLOCK_Q queries, K = BLOCK_K keys, S = STEP keys that are compared at once.

PARTIAL, FULL = 1, 2
COLUMNS = 8  # key blocks of one program: its queries are loaded and summed up once
STEP = 32
CHUNK = 128  # tiles or blocks that a program counts at once

_PARTIAL, _FULL = tl.constexpr(PARTIAL), tl.constexpr(FULL)


@triton.jit
def _or(one, other):
    return one | other


@triton.jit
def _and(one, other):
    return one & other


@triton.jit
def _queries(words, limits, rows, num_queries):
    """allow, always, last, segment and first of some queries; one that does not exist allows nothing."""
    there = rows < num_queries
    allow = tl.load(words + rows, mask=there, other=0)
    always = tl.load(words + num_queries + rows, mask=there, other=0)
    last = tl.load(limits + rows, mask=there, other=0)
    segment = tl.load(limits + num_queries + rows, mask=there, other=-1)
    first = tl.load(limits + 2 * num_queries + rows, mask=there, other=0)
    return allow, always, last, segment, first


@triton.jit
def _keys(words, places, columns, num_keys):
    """own, position and segment of some keys; one that does not exist owns nothing."""
    there = columns < num_keys
    own = tl.load(words + columns, mask=there, other=0)
    position = tl.load(places + columns, mask=there, other=0)
    return own, position, tl.load(places + num_keys + columns, mask=there, other=-1)


@triton.jit
def _bits(word):
    """What some word has, and what all words have."""
    return tl.reduce(word, 0, _or), tl.reduce(word, 0, _and)


@triton.jit
def _range(x):
    return tl.min(x, 0), tl.max(x, 0)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_columns"])
def classify_kernel(
    query_words,
    query_limits,
    key_words,
    key_places,
    kinds,
    num_queries,
    num_keys,
    num_columns,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
):
    """One program: one query block and COLUMNS key blocks.

    Summaries decide most tiles. The pairs of the others are compared, STEP keys at a time, until one
    that attends and one that does not are found. A tile past the last token is never FULL.
    """
    row = tl.program_id(0)
    rows = row * BLOCK_Q + tl.arange(0, BLOCK_Q)
    allow, always, last, segment, first = _queries(query_words, query_limits, rows, num_queries)
    any_allow, all_allow = _bits(allow)
    least_last, most_last = _range(last)
    if HAS_SEGMENTS:
        least_segment, most_segment = _range(segment)
    if HAS_WINDOW:
        any_always, all_always = _bits(always)
        least_first, most_first = _range(first)
    begin = tl.program_id(1) * COLUMNS
    for column in range(begin, tl.minimum(begin + COLUMNS, num_columns)):
        columns = column * BLOCK_K + tl.arange(0, BLOCK_K)
        own, position, key_segment = _keys(key_words, key_places, columns, num_keys)
        any_own, all_own = _bits(own)
        least, most = _range(position)
        may = ((any_allow & any_own) != 0) & (least <= most_last)
        must = ((all_allow & all_own) != 0) & (most <= least_last)
        if HAS_SEGMENTS:
            least_key, most_key = _range(key_segment)
            may = may & (least_segment <= most_key) & (least_key <= most_segment)
            must = must & (least_segment == most_key) & (least_key == most_segment)
        if HAS_WINDOW:
            may = may & ((most >= least_first) | ((any_always & any_own) != 0))
            must = must & ((least >= most_first) | ((all_always & all_own) != 0))
        some, every = may.to(tl.int32), must.to(tl.int32)
        if some > every:
            some, missing, done = 0, 0, 0
            while (done < BLOCK_K) & (some + missing < 2):
                step = column * BLOCK_K + done + tl.arange(0, STEP)
                own_S, position_S, segment_S = _keys(key_words, key_places, step, num_keys)
                seen_QS = (allow[:, None] & own_S[None, :]) != 0
                seen_QS = seen_QS & (position_S[None, :] <= last[:, None])
                if HAS_SEGMENTS:
                    seen_QS = seen_QS & (segment[:, None] == segment_S[None, :])
                if HAS_WINDOW:
                    sink_QS = (always[:, None] & own_S[None, :]) != 0
                    seen_QS = seen_QS & ((position_S[None, :] >= first[:, None]) | sink_QS)
                seen = seen_QS.to(tl.int32)
                some = tl.maximum(some, tl.max(tl.max(seen, 1), 0))
                missing = tl.maximum(missing, 1 - tl.min(tl.min(seen, 1), 0))
                done += STEP
            every = 1 - missing
        kind = tl.where(every != 0, _FULL, tl.where(some != 0, _PARTIAL, 0))
        tl.store(kinds + row.to(tl.int64) * num_columns + column, kind.to(tl.uint8))


@triton.jit(do_not_specialize=["num_blocks", "num_others", "stride_block", "stride_other"])
def count_kernel(kinds, counts, num_blocks, num_others, stride_block, stride_other, CHUNK: tl.constexpr):
    """One program: how many FULL and PARTIAL tiles one block has."""
    block = tl.program_id(0)
    full, partial = 0, 0
    for begin in range(0, num_others, CHUNK):
        other = (begin + tl.arange(0, CHUNK)).to(tl.int64)
        tile = kinds + block.to(tl.int64) * stride_block + other * stride_other
        kind = tl.load(tile, mask=other < num_others, other=0)
        full += tl.sum((kind == _FULL).to(tl.int32), 0)
        partial += tl.sum((kind == _PARTIAL).to(tl.int32), 0)
    tl.store(counts + block, full)
    tl.store(counts + num_blocks + block, partial)


@triton.jit(do_not_specialize=["num_blocks", "num_others", "stride_block", "stride_other"])
def list_kernel(
    kinds,
    counts,
    offsets,
    partial_start,
    others,
    num_blocks,
    num_others,
    stride_block,
    stride_other,
    CHUNK: tl.constexpr,
):
    """One program: the list of one block, behind those of the blocks before it."""
    block = tl.program_id(0)
    start = 0
    for begin in range(0, block, CHUNK):
        before = begin + tl.arange(0, CHUNK)
        full = tl.load(counts + before, mask=before < block, other=0)
        partial = tl.load(counts + num_blocks + before, mask=before < block, other=0)
        start += tl.sum(full + partial, 0)
    middle = start + tl.load(counts + block)
    end = middle + tl.load(counts + num_blocks + block)
    tl.store(offsets + block, start)
    tl.store(partial_start + block, middle)
    if block == num_blocks - 1:
        tl.store(offsets + num_blocks, end)
        tl.store(offsets + num_blocks + 1, end)
        tl.store(partial_start + num_blocks, end)
    for begin in range(0, num_others, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        tile = kinds + block.to(tl.int64) * stride_block + other.to(tl.int64) * stride_other
        kind = tl.load(tile, mask=other < num_others, other=0)
        full = (kind == _FULL).to(tl.int32)
        partial = (kind == _PARTIAL).to(tl.int32)
        tl.store(others + start + tl.cumsum(full, 0) - full, other, mask=full != 0)
        tl.store(others + middle + tl.cumsum(partial, 0) - partial, other, mask=partial != 0)
        start += tl.sum(full, 0)
        middle += tl.sum(partial, 0)


def check_device(device: torch.device) -> None:
    """Raise ValueError where Triton has no kernels: off the GPU, unless it interprets them."""
    if device.type != "cuda" and isinstance(classify_kernel, triton.runtime.JITFunction):
        raise ValueError(
            "device: Triton kernels want cuda, or TRITON_INTERPRET=1 set before Python starts, got "
            f"{device}; reference.py runs anywhere"
        )


def classify(mask: KernelMask, block_q: int, block_k: int) -> Tensor:
    """Kinds [R, C] uint8: 0 where no pair attends, FULL where all do and exist, else PARTIAL.

    Exact, in one launch. Complexity: O(R C) summaries of a block; O(block_q block_k) for tiles that
    they leave open. Memory: R C bytes.
    """
    num_rows, num_columns = -(-mask.num_queries // block_q), -(-mask.num_keys // block_k)
    kinds = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=mask.device)
    if not kinds.numel():
        return kinds
    classify_kernel[(num_rows, -(-num_columns // COLUMNS))](
        mask.query_words,
        mask.query_limits,
        mask.key_words,
        mask.key_places,
        kinds,
        mask.num_queries,
        mask.num_keys,
        num_columns,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        COLUMNS=COLUMNS,
        STEP=min(STEP, block_k),
        HAS_WINDOW=mask.has_window,
        HAS_SEGMENTS=mask.has_segments,
    )
    return kinds


def listed(kinds_LX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tiles of every row of `kinds`, any strides, as lists.

    Returns:
        counts [2, L] int32 of FULL and of PARTIAL tiles; offsets [L+2], partial_start [L+1] and others
        [L X + 1], int32. One entry more than asked for, so that a task of the block past the last one
        reads an empty list; entries of `others` behind the last list are 0.

    Three launches. Memory: 4 L X bytes, since how many tiles there are is not asked.
    """
    num_blocks, num_others = kinds_LX.shape
    device = kinds_LX.device
    counts = torch.empty(2, num_blocks, dtype=torch.int32, device=device)
    offsets = torch.empty(num_blocks + 2, dtype=torch.int32, device=device)
    partial_start = torch.empty(num_blocks + 1, dtype=torch.int32, device=device)
    others = torch.zeros(num_blocks * num_others + 1, dtype=torch.int32, device=device)
    if num_blocks:
        sizes = (num_blocks, num_others, *kinds_LX.stride())
        count_kernel[(num_blocks,)](kinds_LX, counts, *sizes, CHUNK=CHUNK)
        list_kernel[(num_blocks,)](kinds_LX, counts, offsets, partial_start, others, *sizes, CHUNK=CHUNK)
    return counts, offsets, partial_start, others
