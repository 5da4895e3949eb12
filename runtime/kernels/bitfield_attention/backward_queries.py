"""Triton backward pass by query blocks: what both backwards need first, and dQ without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.bitfield_attention.combine import combine_sum
from runtime.kernels.bitfield_attention.head_tiles import has_engine, head_tiles, padded_width
from runtime.kernels.bitfield_attention.launch import section_heads
from runtime.kernels.bitfield_attention.mask import KernelMask
from runtime.kernels.bitfield_attention.plan import KernelPlan
from runtime.kernels.bitfield_attention.tasks import Tasks
from runtime.kernels.bitfield_attention.tilings import Tiling
from runtime.kernels.bitfield_attention.tokens import (
    COUNTS,
    LOG2E,
    entries_of,
    other_block,
    query_fields,
    scored_keys,
    task_and_head,
)

# Shape suffixes: B = batch, H = query heads, G = key/value heads, Q = queries, K = keys, D = head width.
# In kernels: M = BLOCK_M queries, N = BLOCK_N keys of one step.

ROWS = 32


@triton.jit(do_not_specialize=COUNTS)
def row_kernel(
    out_ptr,
    do_ptr,
    lse_ptr,
    lse2_ptr,
    delta_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_row,
    heads,
    num_queries,
    D: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = sum(out * dout) of every query, and its log-sum in base 2.

    An empty row's -inf becomes +inf: then exp2(score - lse) is 0 and no kernel tests for it. Rows
    beyond the last query count as empty.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch_head = tl.program_id(1).to(tl.int64)
    real = rows < num_queries
    width = tl.arange(0, W)
    inside = real[:, None] & (width < D)[None, :]
    batch, head = batch_head // heads, batch_head % heads
    far = rows.to(tl.int64)[:, None]
    out_tile = out_ptr + batch * stride_ob + head * stride_oh + far * stride_om + width[None, :]
    do_tile = do_ptr + batch * stride_dob + head * stride_doh + far * stride_dom + width[None, :]
    out = tl.load(out_tile, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_tile, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + batch_head * num_queries + rows, mask=real, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    row = batch_head * stride_row + rows
    tl.store(delta_ptr + row, tl.sum(out * do, 1), mask=rows < stride_row)
    tl.store(lse2_ptr + row, lse, mask=rows < stride_row)


def row_sums(out_BHQD: Tensor, do_BHQD: Tensor, lse_BHQ: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Log-sums in base 2 (empty rows: +inf) and delta, both [B, H, R] float32: R fills the last block up."""
    batch, heads, num_queries, width = out_BHQD.shape
    num_rows = -(-num_queries // block) * block
    lse2, delta = (
        torch.empty(batch, heads, num_rows, dtype=torch.float32, device=lse_BHQ.device) for _ in "ld"
    )
    grid = (-(-num_rows // ROWS), batch * heads)
    if grid[0] and grid[1]:
        row_kernel[grid](
            out_BHQD,
            do_BHQD,
            lse_BHQ,
            lse2,
            delta,
            *out_BHQD.stride()[:3],
            *do_BHQD.stride()[:3],
            num_rows,
            heads,
            num_queries,
            D=width,
            W=padded_width(width),
            ROWS=ROWS,
            enable_fp_fusion=True,
        )
    return lse2, delta


@triton.jit
def _walk(
    dq,
    q,
    do,
    lse,
    delta,
    fields,
    tiles,
    keys,
    others,
    begin,
    end,
    qk_scale,
    LIST_K: tl.constexpr,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
    RULES: tl.constexpr,
):
    """Entries [begin, end) of a list, all FULL (not MASKED) or all PARTIAL; the rest as of `scored_keys`."""
    BLOCK_N: tl.constexpr = SHAPE[2]
    STEPS: tl.constexpr = LIST_K // BLOCK_N
    other = other_block(others, begin, end)
    for step in range(begin * STEPS, end * STEPS):
        start = other * LIST_K + (step % STEPS) * BLOCK_N
        other = other_block(others, (step + 1) // STEPS, end)
        k, v, score = scored_keys(q, fields, tiles, keys, start, SHAPE, MASKED, RULES)
        p = tl.exp2(score * qk_scale - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=RULES[3])
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=RULES[3])
    return dq


@triton.jit(do_not_specialize=COUNTS)
def queries_kernel(
    q_ptr,
    k_tiles,
    v_tiles,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    part_dq_ptr,
    query_words,
    query_limits,
    query_lowest,
    key_words,
    key_places,
    tasks,
    offsets,
    partial_start,
    others,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_vb,
    stride_vg,
    stride_vn,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_row,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    heads,
    batch_heads,
    group,
    num_queries,
    num_keys,
    num_tasks,
    num_slots,
    section,
    scale,
    qk_scale,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIST_Q: tl.constexpr,
    LIST_K: tl.constexpr,
    EVEN: tl.constexpr,
    ENGINE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M queries of one task, of one head."""
    SUB: tl.constexpr = LIST_Q // BLOCK_M
    item, batch_head = task_and_head(num_tasks * SUB, batch_heads, section)
    task, sub = item // SUB, item % SUB
    block, begin, end, slot = entries_of(tasks, num_tasks, task)
    offset = tl.load(offsets + block)
    num_full = tl.load(partial_start + block) - offset

    local = sub * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = block * LIST_Q + local
    real = rows < num_queries
    width = tl.arange(0, W)
    inside = real[:, None] & (width < D)[None, :]
    far = rows.to(tl.int64)[:, None]
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    q_tile = q_ptr + batch * stride_qb + head * stride_qh + far * stride_qm + width[None, :]
    do_tile = do_ptr + batch * stride_dob + head * stride_doh + far * stride_dom + width[None, :]
    q = tl.load(q_tile, mask=inside, other=0.0)
    do = tl.load(do_tile, mask=inside, other=0.0)
    row = batch_head.to(tl.int64) * stride_row + rows
    lse = tl.load(lse_ptr + row, mask=real, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=real, other=0.0)
    fields = query_fields(
        (query_words, query_limits, query_lowest),
        rows,
        num_queries,
        EVEN=False,
        HAS_WINDOW=HAS_WINDOW,
        HAS_SEGMENTS=HAS_SEGMENTS,
    )

    if not ENGINE:
        k_tiles += batch * stride_kb + (head // group) * stride_kg
        v_tiles += batch * stride_vb + (head // group) * stride_vg
    dq = tl.zeros([BLOCK_M, W], tl.float32)
    for masked in tl.static_range(2):
        dq = _walk(
            dq,
            q,
            do,
            lse,
            delta,
            fields,
            (k_tiles, v_tiles, batch_head // heads, (batch_head % heads) // group, stride_kn, stride_vn),
            (key_words, key_places, num_keys),
            others,
            offset + (tl.maximum(begin, num_full) if masked else begin),
            offset + (end if masked else tl.minimum(end, num_full)),
            qk_scale,
            LIST_K,
            (D, W, BLOCK_N, EVEN),
            masked == 1,
            (ENGINE, HAS_WINDOW, HAS_SEGMENTS, PRECISION),
        )

    dq *= scale
    if slot < 0:
        dq_tile = dq_ptr + batch * stride_dqb + head * stride_dqh + far * stride_dqm + width[None, :]
        tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=inside)
    else:
        part_row = (batch_head.to(tl.int64) * num_slots + slot) * LIST_Q + local
        tl.store(part_dq_ptr + part_row[:, None] * D + width[None, :], dq, mask=(width < D)[None, :])


def queries_gradient(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    do_BHQD: Tensor,
    lse2_BHR: Tensor,
    delta_BHR: Tensor,
    mask: KernelMask,
    plan: KernelPlan,
    launch: Tasks,
    tile: Tiling,
    scale: float,
) -> Tensor:
    """dQ [B, H, Q, D]: two more products per tile than the fused pass, the same bits in every run."""
    batch, heads, num_queries, width = q_BHQD.shape
    dq = torch.empty_like(q_BHQD)
    slots = (batch * heads, launch.num_slots, plan.block_q, width)
    part_dq = torch.empty(slots, dtype=torch.float32, device=q_BHQD.device)
    group = heads // k_BGKD.shape[1]
    head_bytes = 2 * plan.num_keys * width * k_BGKD.element_size()
    grid = (launch.num_tasks * (plan.block_q // tile.block_m) * batch * heads,)
    if not grid[0]:
        return dq
    if not plan.num_keys:
        return dq.zero_()
    engine = has_engine(q_BHQD.device)
    queries_kernel[grid](
        q_BHQD,
        head_tiles(k_BGKD, tile.block_n) if engine else k_BGKD,
        head_tiles(v_BGKD, tile.block_n) if engine else v_BGKD,
        do_BHQD,
        lse2_BHR,
        delta_BHR,
        dq,
        part_dq,
        *mask.tensors,
        launch.table,
        *plan.rows.tensors,
        *q_BHQD.stride()[:3],
        *k_BGKD.stride()[:3],
        *v_BGKD.stride()[:3],
        *do_BHQD.stride()[:3],
        lse2_BHR.shape[2],
        *dq.stride()[:3],
        heads,
        batch * heads,
        group,
        num_queries,
        plan.num_keys,
        launch.num_tasks,
        launch.num_slots,
        section_heads(q_BHQD.device, head_bytes, group, batch * heads),
        scale,
        scale * 1.4426950408889634,
        EVEN=plan.num_keys % plan.block_k == 0,
        ENGINE=engine,
        **plan.launched(mask, tile, width),
    )
    combine_sum(part_dq, launch, dq)
    return dq
