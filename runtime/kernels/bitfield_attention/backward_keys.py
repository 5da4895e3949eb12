"""Triton backward pass by key blocks: dK and dV in registers, and dQ added to memory where asked.

Works on the transposed scores [N, M], so that neither P nor dS is transposed for dV and dK. With
dQ that is five products per tile (10 D FLOP per attended pair and head). It is added by a float32
atomic per element, or through shared memory by the copy engine, which adds a whole tile at a time and
asks nothing of the registers after that. Either makes dQ depend on the order of arrival in its last
bits. Without dQ the result is the same in every run.

A task walks the list of its key block once for every query head of the group: entry i of the
FULL part is tile i % n of head i // n. So one cut splits a long column and a wide group alike.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.kernels.bitfield_attention.combine import combine_sum
from runtime.kernels.bitfield_attention.launch import section_heads
from runtime.kernels.bitfield_attention.mask import KernelMask
from runtime.kernels.bitfield_attention.plan import KernelPlan
from runtime.kernels.bitfield_attention.tasks import Tasks
from runtime.kernels.bitfield_attention.tilings import Tiling
from runtime.kernels.bitfield_attention.tokens import (
    COUNTS,
    attends,
    entries_of,
    key_fields,
    other_block,
    query_fields,
    task_and_head,
)

# Shape suffixes: B = batch, H = query heads, G = key/value heads, Q = queries, K = keys, D = head width.
# In kernels: M = BLOCK_M queries of one step, N = BLOCK_N keys.


@triton.jit
def _walk(
    dk,
    dv,
    k,
    v,
    own,
    groups,
    strides,
    queries,
    others,
    count,
    begin,
    end,
    num_queries,
    stride_row,
    qk_scale,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LIST_Q: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_DQ: tl.constexpr,
    ENGINE: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Entries [begin, end) of the FULL or of the PARTIAL part, `count` tiles for each head.

    Args:
        own: words and places of the keys.
        groups: first rows of q, do, dq, lse and delta of the group's first head. With ENGINE dq is a pair:
            the tiles of all heads, and the number of that row among theirs.
        strides: of q and do, by head and by row.
        queries: words, limits and lowest of all queries.
    """
    q_group, do_group, dq_group, lse_group, delta_group = groups
    stride_qh, stride_qm, stride_doh, stride_dom = strides
    STEPS: tl.constexpr = LIST_Q // BLOCK_M
    local = tl.arange(0, BLOCK_M)
    width = tl.arange(0, W)
    head = begin // tl.maximum(count, 1)
    entry = begin - head * count
    other = other_block(others, entry, count)
    for step in range(begin * STEPS, end * STEPS):
        start = other * LIST_Q + (step % STEPS) * BLOCK_M
        rows = start + local
        far = start.to(tl.int64)
        q_tile = q_group + head.to(tl.int64) * stride_qh + far * stride_qm
        q_tile += local[:, None] * stride_qm + width[None, :]
        do_tile = do_group + head.to(tl.int64) * stride_doh + far * stride_dom
        do_tile += local[:, None] * stride_dom + width[None, :]
        first_row = head.to(tl.int64) * stride_row + far
        row = first_row + local
        # The next step's tile by counting, where a division a step would do.
        entry = tl.where(step % STEPS == STEPS - 1, entry + 1, entry)
        head = tl.where(entry == count, head + 1, head)
        entry = tl.where(entry == count, 0, entry)
        other = other_block(others, entry, count)
        if MASKED and not EVEN:
            inside = (rows < num_queries)[:, None] & (width < D)[None, :]
            q = tl.load(q_tile, mask=inside, other=0.0)
            do = tl.load(do_tile, mask=inside, other=0.0)
        elif W != D:
            q = tl.load(q_tile, mask=(width < D)[None, :], other=0.0)
            do = tl.load(do_tile, mask=(width < D)[None, :], other=0.0)
        else:
            q = tl.load(q_tile)
            do = tl.load(do_tile)
        lse = tl.load(lse_group + row)
        delta = tl.load(delta_group + row)
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if MASKED:
            fields = query_fields(queries, rows, num_queries, EVEN, HAS_WINDOW, HAS_SEGMENTS)
            seen = attends(fields, own, 1, HAS_WINDOW, HAS_SEGMENTS)
            score = tl.where(seen, score, float("-inf"))
        p = tl.exp2(score * qk_scale - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if WITH_DQ:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
            if ENGINE:
                # Columns from D on lie outside the tensor, where the engine writes nothing.
                dq_group[0].atomic_add([(dq_group[1] + first_row).to(tl.int32), 0], dq)
            else:
                dq_tile = dq_group + row[:, None] * D + width[None, :]
                if W != D:
                    tl.atomic_add(dq_tile, dq, mask=(width < D)[None, :], sem="relaxed")
                else:
                    tl.atomic_add(dq_tile, dq, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    part_dk_ptr,
    part_dv_ptr,
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
    stride_dkb,
    stride_dkg,
    stride_dkn,
    stride_dvb,
    stride_dvg,
    stride_dvn,
    kv_heads,
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
    WITH_DQ: tl.constexpr,
    ENGINE: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_N keys of one task, of one key/value head."""
    SUB: tl.constexpr = LIST_K // BLOCK_N
    item, batch_head = task_and_head(num_tasks * SUB, batch_heads, section)
    task, sub = item // SUB, item % SUB
    block, begin, end, slot = entries_of(tasks, num_tasks, task)
    offset = tl.load(offsets + block)
    middle = tl.load(partial_start + block)
    full_each = middle - offset
    partial_each = tl.load(offsets + block + 1) - middle
    num_full = full_each * group

    local = sub * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = block * LIST_K + local
    real = columns < num_keys
    width = tl.arange(0, W)
    inside = real[:, None] & (width < D)[None, :]
    far = columns.to(tl.int64)[:, None]
    batch = (batch_head // kv_heads).to(tl.int64)
    head = (batch_head % kv_heads).to(tl.int64)
    k_tile = k_ptr + batch * stride_kb + head * stride_kg + far * stride_kn + width[None, :]
    v_tile = v_ptr + batch * stride_vb + head * stride_vg + far * stride_vn + width[None, :]
    k = tl.load(k_tile, mask=inside, other=0.0)
    v = tl.load(v_tile, mask=inside, other=0.0)
    own = key_fields(key_words, key_places, columns, num_keys, EVEN=False)
    first_row = batch_head.to(tl.int64) * group * stride_row

    dk = tl.zeros([BLOCK_N, W], tl.float32)
    dv = tl.zeros([BLOCK_N, W], tl.float32)
    for masked in tl.static_range(2):
        dk, dv = _walk(
            dk,
            dv,
            k,
            v,
            own,
            (
                q_ptr + batch * stride_qb + head * group * stride_qh,
                do_ptr + batch * stride_dob + head * group * stride_doh,
                (dq_ptr, first_row) if ENGINE else dq_ptr + first_row * D,
                lse_ptr + first_row,
                delta_ptr + first_row,
            ),
            (stride_qh, stride_qm, stride_doh, stride_dom),
            (query_words, query_limits, query_lowest),
            others + (middle if masked else offset),
            partial_each if masked else full_each,
            (tl.maximum(begin, num_full) - num_full) if masked else begin,
            (end - num_full) if masked else tl.minimum(end, num_full),
            num_queries,
            stride_row,
            qk_scale,
            D,
            W,
            BLOCK_M,
            LIST_Q,
            masked == 1,
            WITH_DQ,
            ENGINE,
            EVEN,
            HAS_WINDOW,
            HAS_SEGMENTS,
            PRECISION,
        )

    dk *= scale
    if slot < 0:
        dk_tile = dk_ptr + batch * stride_dkb + head * stride_dkg + far * stride_dkn + width[None, :]
        dv_tile = dv_ptr + batch * stride_dvb + head * stride_dvg + far * stride_dvn + width[None, :]
        tl.store(dk_tile, dk.to(dk_ptr.dtype.element_ty), mask=inside)
        tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=inside)
    else:
        row = (batch_head.to(tl.int64) * num_slots + slot) * LIST_K + local
        tl.store(part_dk_ptr + row[:, None] * D + width[None, :], dk, mask=(width < D)[None, :])
        tl.store(part_dv_ptr + row[:, None] * D + width[None, :], dv, mask=(width < D)[None, :])


def keys_gradient(
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
    dq: Tensor | TensorDescriptor | None,
) -> tuple[Tensor, Tensor]:
    """dK and dV [B, G, K, D]; adds dQ / scale to `dq` if that is given.

    Args:
        dq: contiguous float32 [B, H, R, D], added to by atomics, or its `sum_tiles` of the tile's height,
            added to by the copy engine. Rows R are the queries and what fills the last block up.
    """
    batch, heads, num_queries, width = q_BHQD.shape
    kv_heads = k_BGKD.shape[1]
    dk, dv = torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)
    slots = (batch * kv_heads, launch.num_slots, plan.block_k, width)
    part_dk = torch.empty(slots, dtype=torch.float32, device=k_BGKD.device)
    part_dv = torch.empty(slots, dtype=torch.float32, device=k_BGKD.device)
    group = heads // kv_heads
    head_bytes = 2 * group * num_queries * width * q_BHQD.element_size()
    grid = (launch.num_tasks * (plan.block_k // tile.block_n) * batch * kv_heads,)
    if not grid[0]:
        return dk, dv
    if not num_queries:
        return dk.zero_(), dv.zero_()
    keys_kernel[grid](
        q_BHQD,
        k_BGKD,
        v_BGKD,
        do_BHQD,
        lse2_BHR,
        delta_BHR,
        lse2_BHR if dq is None else dq,
        dk,
        dv,
        part_dk,
        part_dv,
        *mask.tensors,
        launch.table,
        *plan.columns.tensors,
        *q_BHQD.stride()[:3],
        *k_BGKD.stride()[:3],
        *v_BGKD.stride()[:3],
        *do_BHQD.stride()[:3],
        lse2_BHR.shape[2],
        *dk.stride()[:3],
        *dv.stride()[:3],
        kv_heads,
        batch * kv_heads,
        group,
        num_queries,
        plan.num_keys,
        launch.num_tasks,
        launch.num_slots,
        section_heads(k_BGKD.device, head_bytes, 1, batch * kv_heads),
        scale,
        scale * 1.4426950408889634,
        WITH_DQ=dq is not None,
        ENGINE=isinstance(dq, TensorDescriptor),
        EVEN=plan.num_queries % plan.block_q == 0,
        **plan.launched(mask, tile, width),
    )
    combine_sum(part_dk, launch, dk)
    combine_sum(part_dv, launch, dv)
    return dk, dv
