"""Triton forward pass: online softmax over the listed tiles of each query block.

Products per attended pair and head: 4 D FLOP. A task reads its queries once and K, V per tile.
Scores live in base 2: exp2 of log2(e) times the scaled product. The running maximum starts at a
finite value, so a masked score of -inf never meets another one and no NaN has to be repaired.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.bitfield_attention.combine import combine_softmax
from runtime.kernels.bitfield_attention.head_tiles import has_engine, head_tiles
from runtime.kernels.bitfield_attention.launch import section_heads
from runtime.kernels.bitfield_attention.mask import KernelMask
from runtime.kernels.bitfield_attention.plan import KernelPlan
from runtime.kernels.bitfield_attention.tasks import Tasks
from runtime.kernels.bitfield_attention.tilings import Tiling
from runtime.kernels.bitfield_attention.tokens import (
    COUNTS,
    LN2,
    entries_of,
    other_block,
    query_fields,
    scored_keys,
    task_and_head,
)

# Shape suffixes: B = batch, H = query heads, G = key/value heads, Q = queries, K = keys, D = head width.
# In kernels: M = BLOCK_M queries, N = BLOCK_N keys of one step.

LOWEST = tl.constexpr(-1e30)


@triton.jit
def _walk(
    q,
    total,
    peak,
    acc,
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
        _, v, score = scored_keys(q, fields, tiles, keys, start, SHAPE, MASKED, RULES)
        higher = tl.maximum(peak, tl.max(score, 1) * qk_scale)
        p = tl.exp2(score * qk_scale - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=RULES[3])
        peak = higher
    return total, peak, acc


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_ptr,
    k_tiles,
    v_tiles,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
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
    stride_ob,
    stride_oh,
    stride_om,
    heads,
    batch_heads,
    group,
    num_queries,
    num_keys,
    num_tasks,
    num_slots,
    section,
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
    width = tl.arange(0, W)
    inside = (rows < num_queries)[:, None] & (width < D)[None, :]
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    q_tile = q_ptr + batch * stride_qb + head * stride_qh
    q_tile += rows.to(tl.int64)[:, None] * stride_qm + width[None, :]
    q = tl.load(q_tile, mask=inside, other=0.0)
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

    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    acc = tl.zeros([BLOCK_M, W], tl.float32)
    for masked in tl.static_range(2):
        total, peak, acc = _walk(
            q,
            total,
            peak,
            acc,
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

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN2)
    if slot < 0:
        tl.store(lse_ptr + batch_head.to(tl.int64) * num_queries + rows, lse, mask=rows < num_queries)
        out_tile = out_ptr + batch * stride_ob + head * stride_oh
        out_tile += rows.to(tl.int64)[:, None] * stride_om + width[None, :]
        tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        row = (batch_head.to(tl.int64) * num_slots + slot) * LIST_Q + local
        tl.store(part_lse_ptr + row, lse)
        tl.store(part_out_ptr + row[:, None] * D + width[None, :], out, mask=(width < D)[None, :])


def forward(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask: KernelMask,
    plan: KernelPlan,
    launch: Tasks,
    tile: Tiling,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, D] (laid out as [B, Q, H, D]) and natural-log sums [B, H, Q] float32."""
    batch, heads, num_queries, width = q_BHQD.shape
    out = torch.empty(batch, num_queries, heads, width, dtype=q_BHQD.dtype, device=q_BHQD.device).transpose(
        1, 2
    )
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q_BHQD.device)
    slots = (batch * heads, launch.num_slots, plan.block_q)
    part_out = torch.empty(*slots, width, dtype=torch.float32, device=q_BHQD.device)
    part_lse = torch.empty(*slots, dtype=torch.float32, device=q_BHQD.device)
    group = heads // k_BGKD.shape[1]
    head_bytes = 2 * plan.num_keys * width * k_BGKD.element_size()
    grid = (launch.num_tasks * (plan.block_q // tile.block_m) * batch * heads,)
    if not grid[0]:
        return out, lse
    if not plan.num_keys:
        return out.zero_(), lse.fill_(-torch.inf)
    engine = has_engine(q_BHQD.device)
    forward_kernel[grid](
        q_BHQD,
        head_tiles(k_BGKD, tile.block_n) if engine else k_BGKD,
        head_tiles(v_BGKD, tile.block_n) if engine else v_BGKD,
        out,
        lse,
        part_out,
        part_lse,
        *mask.tensors,
        launch.table,
        *plan.rows.tensors,
        *q_BHQD.stride()[:3],
        *k_BGKD.stride()[:3],
        *v_BGKD.stride()[:3],
        *out.stride()[:3],
        heads,
        batch * heads,
        group,
        num_queries,
        plan.num_keys,
        launch.num_tasks,
        launch.num_slots,
        section_heads(q_BHQD.device, head_bytes, group, batch * heads),
        scale * 1.4426950408889634,
        EVEN=plan.num_keys % plan.block_k == 0,
        ENGINE=engine,
        **plan.launched(mask, tile, width),
    )
    combine_softmax(part_out, part_lse, launch, out, lse)
    return out, lse
