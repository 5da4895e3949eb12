"""Bitfield attention for autograd: what callers import."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.backward_keys import keys_gradient
from runtime.kernels.bitfield_attention.backward_queries import queries_gradient, row_sums
from runtime.kernels.bitfield_attention.forward import forward
from runtime.kernels.bitfield_attention.head_tiles import has_engine, sum_tiles
from runtime.kernels.bitfield_attention.launch import LaunchShape, resident_tasks
from runtime.kernels.bitfield_attention.mask import KernelMask
from runtime.kernels.bitfield_attention.plan import KernelPlan
from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split, Tasks, make_tasks
from runtime.kernels.bitfield_attention.tiles import check_device
from runtime.kernels.bitfield_attention.tilings import Pass, Tiling, tiling

# Shape suffixes: B = batch, H = query heads, G = key/value heads, Q = queries, K = keys, D = head width.


class Backward(Enum):
    """How dQ is summed over key blocks.

    ENGINE wants Hopper or newer, and was never timed. Triton's interpreter cannot do it.
    """

    FUSED = "one pass over key blocks, dQ by float32 atomics"
    ENGINE = "one pass over key blocks, dQ added by the copy engine"
    DETERMINISTIC = "two passes, no atomics: the same bits in every run"


@dataclass(frozen=True, slots=True)
class Options:
    """What changes speed and rounding, never meaning.

    Args:
        backward: how gradients are accumulated.
        split: whether long lists are cut into pieces that run side by side.
        tilings: overrides of the table of tilings, for tuning.
    """

    backward: Backward = Backward.FUSED
    split: Split | FixedSplit = Split.WHERE_IT_PAYS
    tilings: tuple[tuple[Pass, Tiling], ...] = ()


DEFAULT = Options()
WIDE_STAGES = 2


def bitfield_attention(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask: KernelMask,
    plan: KernelPlan,
    *,
    scale: float | None = None,
    options: Options = DEFAULT,
) -> Tensor:
    """Softmax attention over the keys each query attends to; differentiable in q, k and v.

    The mask holds for every row of the batch and every head. Query head h reads key/value head
    h // (H // G). A query that attends to nothing gets zeros and gives no gradient.

    Args:
        q_BHQD, k_BGKD, v_BGKD: bf16, fp16 or fp32 with D of HEAD_DIMS, any strides but D's.
        mask, plan: of the same queries and keys, on the same device.
        scale: of the products, > 0; None is 1 / sqrt(D).

    Returns:
        [B, H, Q, D] in the dtype of q, laid out as [B, Q, H, D].

    Raises:
        ValueError: shapes that do not fit, an unsupported head width, dtype or device, or options that
            the device does not know.
    """
    out, _ = attention_with_lse(q_BHQD, k_BGKD, v_BGKD, mask, plan, scale=scale, options=options)
    return out


def attention_with_lse(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask: KernelMask,
    plan: KernelPlan,
    *,
    scale: float | None = None,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """As `bitfield_attention`, with the natural-log sums [B, H, Q] float32, which carry no gradient."""
    check_attention(q_BHQD, k_BGKD, v_BGKD, mask, plan)
    scale = 1 / math.sqrt(q_BHQD.shape[-1]) if scale is None else scale
    if scale <= 0:
        raise ValueError(f"scale must be > 0, got {scale}")
    out, lse = _Attention.apply(q_BHQD, k_BGKD, v_BGKD, mask, plan, scale, options)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: KernelMask,
        plan: KernelPlan,
        scale: float,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_dense_rows(x) for x in (q, k, v))
        out, lse = attention_forward(q, k, v, mask, plan, scale, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.plan, ctx.scale, ctx.options = mask, plan, scale, options
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = attention_backward(q, k, v, out, lse, do, ctx.mask, ctx.plan, ctx.scale, ctx.options)
        return *gradients, None, None, None, None


def attention_forward(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask: KernelMask,
    plan: KernelPlan,
    scale: float,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Output and log-sums outside autograd, for callers that order the passes themselves."""
    _check_engine(q_BHQD.device, options)
    tile = forward_tile(q_BHQD, mask, plan, options)
    with _launching_on(q_BHQD.device):
        launch = _launch(q_BHQD, k_BGKD, plan, tile, options, by_column=False)
        return forward(q_BHQD, k_BGKD, v_BGKD, mask, plan, launch, tile, scale)


def attention_backward(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    do_BHQD: Tensor,
    mask: KernelMask,
    plan: KernelPlan,
    scale: float,
    options: Options = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV from what `attention_forward` returned."""
    _check_engine(q_BHQD.device, options)
    do_BHQD = _dense_rows(do_BHQD)
    with _launching_on(q_BHQD.device):
        lse2, delta = row_sums(out_BHQD, do_BHQD, lse_BHQ, plan.block_q)
        inputs = (q_BHQD, k_BGKD, v_BGKD, do_BHQD, lse2, delta, mask, plan)
        if options.backward is not Backward.DETERMINISTIC:
            by_engine = options.backward is Backward.ENGINE
            tile = _tile(Pass.ENGINE if by_engine else Pass.FUSED, q_BHQD, plan, options)
            sums = torch.zeros(*lse2.shape, q_BHQD.shape[-1], dtype=torch.float32, device=q_BHQD.device)
            columns = _launch(q_BHQD, k_BGKD, plan, tile, options, by_column=True)
            added = sum_tiles(sums, tile.block_m) if by_engine and sums.numel() else sums
            dk, dv = keys_gradient(*inputs, columns, tile, scale, added)
            dq = torch.empty(q_BHQD.shape, dtype=q_BHQD.dtype, device=q_BHQD.device)
            return torch.mul(sums[:, :, : q_BHQD.shape[2]], scale, out=dq), dk, dv
        tile = _tile(Pass.QUERIES, q_BHQD, plan, options)
        rows = _launch(q_BHQD, k_BGKD, plan, tile, options, by_column=False)
        dq = queries_gradient(*inputs, rows, tile, scale)
        tile = _tile(Pass.KEYS, q_BHQD, plan, options)
        columns = _launch(q_BHQD, k_BGKD, plan, tile, options, by_column=True)
        dk, dv = keys_gradient(*inputs, columns, tile, scale, None)
        return dq, dk, dv


def _launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_attention(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask: KernelMask, plan: KernelPlan
) -> None:
    """Refuse what the kernels cannot do. There is no fallback.

    Raises:
        ValueError: naming the thing, the rule and the value.
    """
    if any(x.ndim != 4 for x in (q_BHQD, k_BGKD, v_BGKD)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BHQD, k_BGKD, v_BGKD))
        raise ValueError(f"q, k, v: want [batch, heads, tokens, head dim], got {shapes}")
    batch, heads, num_queries, width = q_BHQD.shape
    kv_heads = k_BGKD.shape[1]
    if k_BGKD.shape != v_BGKD.shape or k_BGKD.shape[0] != batch or k_BGKD.shape[3] != width:
        raise ValueError(
            f"k and v: want equal shapes with batch {batch} and head dim {width}, got "
            f"{tuple(k_BGKD.shape)} and {tuple(v_BGKD.shape)}"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query heads: want a multiple of {kv_heads} key/value heads, got {heads}")
    if not q_BHQD.dtype == k_BGKD.dtype == v_BGKD.dtype:
        raise ValueError(f"q, k, v: want one dtype, got {q_BHQD.dtype}, {k_BGKD.dtype}, {v_BGKD.dtype}")
    if not q_BHQD.device == k_BGKD.device == v_BGKD.device == mask.device:
        raise ValueError(
            f"q, k, v, mask: want one device, got {q_BHQD.device}, {k_BGKD.device}, "
            f"{v_BGKD.device}, {mask.device}"
        )
    tokens = (num_queries, k_BGKD.shape[2])
    for name, have in (
        ("mask", (mask.num_queries, mask.num_keys)),
        ("plan", (plan.num_queries, plan.num_keys)),
    ):
        if have != tokens:
            raise ValueError(
                f"{name}: made for {have[0]} queries and {have[1]} keys, "
                f"q and k have {tokens[0]} and {tokens[1]}"
            )
    tiling(Pass.FORWARD, width, q_BHQD.dtype, q_BHQD.device, plan.block_q, plan.block_k)
    check_device(q_BHQD.device)


def _check_engine(device: torch.device, options: Options) -> None:
    if options.backward is Backward.ENGINE and not has_engine(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"backward {options.backward.name}: want a copy engine, compute capability 9.0 or newer, got "
            f"{major}.{minor}; {Backward.FUSED.name} runs there"
        )


def _dense_rows(x: Tensor) -> Tensor:
    """The kernels step through the last dim by one; every other stride is free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward_tile(q: Tensor, mask: KernelMask, plan: KernelPlan, options: Options) -> Tiling:
    """Of the forward: masks of more than 32 groups have words of 64 bits, and three buffers beside these
    would take 24 bytes more shared memory than a block of Hopper has.
    """
    tile = _tile(Pass.FORWARD, q, plan, options)
    is_wide = mask.key_words.dtype == torch.int64
    return replace(tile, num_stages=min(tile.num_stages, WIDE_STAGES)) if is_wide else tile


def _tile(which: Pass, q: Tensor, plan: KernelPlan, options: Options) -> Tiling:
    for overridden, tile in options.tilings:
        if overridden is which:
            return tile
    return tiling(which, q.shape[-1], q.dtype, q.device, plan.block_q, plan.block_k)


def _launch(
    q: Tensor, k: Tensor, plan: KernelPlan, tile: Tiling, options: Options, *, by_column: bool
) -> Tasks:
    """Tasks by key blocks, each for every query head of a group, or by query blocks; made once."""
    own, parts = (k, plan.block_k // tile.block_n) if by_column else (q, plan.block_q // tile.block_m)
    shape = LaunchShape(
        by_column=by_column,
        repeat=q.shape[1] // k.shape[1] if by_column else 1,
        num_heads=own.shape[0] * own.shape[1] * parts,
        slots=resident_tasks(q.device, tile.num_warps),
        split=options.split,
    )
    if shape not in plan.launches:
        lists = plan.columns if by_column else plan.rows
        plan.launches[shape] = make_tasks(
            lists.num_full,
            lists.num_partial,
            num_heads=shape.num_heads,
            num_slots=shape.slots,
            split=shape.split,
            repeat=shape.repeat,
        )
    return plan.launches[shape]
