"""One block of distributed attention under a mask: the kernels on a GPU, plain PyTorch on the CPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.attention import (
    attention_backward,
    attention_forward,
    check_attention,
)
from runtime.models.attention_mask import AttentionMask
from runtime.parallel.context.block import attend, attend_backward
from workbench.masks.tiles import classify

# Shape suffixes: T = queries, S = keys, H = query heads, G = key/value heads, D = head width.


class View(NamedTuple):
    """What queries see of keys, and how scores are scaled."""

    mask: AttentionMask
    window: int | None
    scale: float


def view_forward(q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and log-sum-exp [H, T]; 0 and -inf for a query that sees no key.

    Raises:
        ValueError: the kernels do not support the head width or dtype. Nothing else runs on a GPU.
    """
    if not uses_kernels(q_HTD.device):
        return attend(q_HTD, k_GSD, v_GSD, view.mask.dense(view.window), view.scale)
    mask, plan = view.mask.planned(view.window)
    q, k, v = q_HTD[None], k_GSD[None], v_GSD[None]
    check_attention(q, k, v, mask, plan)
    y, lse = attention_forward(q, k, v, mask, plan, view.scale, view.mask.options)
    return y[0], lse[0]


def view_backward(
    dy_HTD: Tensor, forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], view: View
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; arguments as of `attend_backward`."""
    if not uses_kernels(dy_HTD.device):
        return attend_backward(dy_HTD, forward, view.mask.dense(view.window), view.scale)
    mask, plan = view.mask.planned(view.window)
    q, k, v, y, lse, dy = (x[None] for x in (*forward, dy_HTD))
    dq, dk, dv = attention_backward(q, k, v, y, lse, dy, mask, plan, view.scale, view.mask.options)
    return dq[0], dk[0], dv[0]


def is_empty(mask: AttentionMask) -> bool:
    """Whether no query sees any key; on a GPU without T x S memory."""
    if uses_kernels(mask.device):
        return not len(classify(mask.queries, mask.keys, mask.block, mask.block).columns)
    return not bool(mask.dense().any())


def uses_kernels(device: torch.device) -> bool:
    """Whether attention on that device runs in the kernels."""
    return device.type == "cuda"
