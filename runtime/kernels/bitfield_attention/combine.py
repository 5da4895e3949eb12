"""Second pass over split blocks only: partial results become outputs, in the order of the slots.

Two passes and no atomics: the result does not depend on which piece finished first.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.bitfield_attention.head_tiles import padded_width
from runtime.kernels.bitfield_attention.tasks import Tasks
from runtime.kernels.bitfield_attention.tokens import COUNTS

# Shape suffixes: B = batch, H = heads, T = tokens of the split side, L = tokens of a block, D = head
# width, S = slots.

ROWS = 16  # of one program


@triton.jit(do_not_specialize=COUNTS)
def softmax_kernel(
    part_out_ptr,
    part_lse_ptr,
    split_block,
    split_start,
    out_ptr,
    lse_ptr,
    stride_b,
    stride_h,
    stride_t,
    heads,
    num_tokens,
    num_slots,
    D: tl.constexpr,
    W: tl.constexpr,
    LIST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge partial softmaxes: weights exp(lse - highest lse), as online softmax does between tiles."""
    split, sub = tl.program_id(0) // (LIST // ROWS), tl.program_id(0) % (LIST // ROWS)
    batch_head = tl.program_id(1).to(tl.int64)
    local = sub * ROWS + tl.arange(0, ROWS)
    rows = tl.load(split_block + split) * LIST + local
    width = tl.arange(0, W)
    real = (width < D)[None, :]
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, W], tl.float32)
    for slot in range(tl.load(split_start + split), tl.load(split_start + split + 1)):
        row = (batch_head * num_slots + slot) * LIST + local
        lse = tl.load(part_lse_ptr + row)
        higher = tl.maximum(peak, lse)
        weight, shrink = tl.exp(lse - higher), tl.exp(peak - higher)
        total = total * shrink + weight
        part = tl.load(part_out_ptr + row[:, None] * D + width[None, :], mask=real, other=0.0)
        acc = acc * shrink[:, None] + part * weight[:, None]
        peak = higher
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    inside = rows < num_tokens
    lse = tl.where(empty, float("-inf"), peak + tl.log(total))
    tl.store(lse_ptr + batch_head * num_tokens + rows, lse, mask=inside)
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_tile = out_ptr + (batch_head // heads) * stride_b + (batch_head % heads) * stride_h
    out_tile += rows.to(tl.int64)[:, None] * stride_t + width[None, :]
    tl.store(out_tile, out, mask=inside[:, None] & real)


@triton.jit(do_not_specialize=COUNTS)
def sum_kernel(
    part_ptr,
    split_block,
    split_start,
    out_ptr,
    stride_b,
    stride_h,
    stride_t,
    heads,
    num_tokens,
    num_slots,
    D: tl.constexpr,
    W: tl.constexpr,
    LIST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add partial gradients."""
    split, sub = tl.program_id(0) // (LIST // ROWS), tl.program_id(0) % (LIST // ROWS)
    batch_head = tl.program_id(1).to(tl.int64)
    local = sub * ROWS + tl.arange(0, ROWS)
    rows = tl.load(split_block + split) * LIST + local
    width = tl.arange(0, W)
    real = (width < D)[None, :]
    acc = tl.zeros([ROWS, W], tl.float32)
    for slot in range(tl.load(split_start + split), tl.load(split_start + split + 1)):
        row = (batch_head * num_slots + slot) * LIST + local
        acc += tl.load(part_ptr + row[:, None] * D + width[None, :], mask=real, other=0.0)
    out_tile = out_ptr + (batch_head // heads) * stride_b + (batch_head % heads) * stride_h
    out_tile += rows.to(tl.int64)[:, None] * stride_t + width[None, :]
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=(rows < num_tokens)[:, None] & real)


def combine_softmax(
    part_out: Tensor, part_lse: Tensor, launch: Tasks, out_BHTD: Tensor, lse_BHT: Tensor
) -> None:
    """Fill the rows of split blocks from part_out [B*H, S, L, D] and part_lse [B*H, S, L], both float32."""
    _combine(softmax_kernel, (part_out, part_lse), launch, (out_BHTD, lse_BHT))


def combine_sum(part: Tensor, launch: Tasks, out_BHTD: Tensor) -> None:
    """Fill the rows of split blocks with the sums over part [B*H, S, L, D] float32."""
    _combine(sum_kernel, (part,), launch, (out_BHTD,))


def _combine(kernel: Any, parts: Sequence[Tensor], launch: Tasks, results: Sequence[Tensor]) -> None:
    batch_heads, num_slots, length, width = parts[0].shape
    if num_slots == 0 or batch_heads == 0:
        return
    kernel[(len(launch.split_block) * (length // ROWS), batch_heads)](
        *parts,
        launch.split_block,
        launch.split_start,
        *results,
        *results[0].stride()[:3],
        *results[0].shape[1:3],
        num_slots,
        D=width,
        W=padded_width(width),
        LIST=length,
        ROWS=ROWS,
        enable_fp_fusion=True,
    )
