"""Attention of queries over a set of keys, forward and backward: kernels on a GPU, else plain PyTorch.

The building block of distributed attention: a forward returns the output and the log-sum-exp of its scores,
which suffice to run its backward, or to merge it with the output over other keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.attention import (
    attention_backward,
    attention_forward,
    check_attention,
)
from runtime.models.attention_mask import AttentionMask
from workbench.masks.tiles import classify

# Shape suffixes: T = queries, S = keys, H = query heads, G = key/value heads (G divides H), D = head width.


def wide(dtype: torch.dtype) -> torch.dtype:
    """Type of accumulators: float32, or float64 for such inputs."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor, mask_TS: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and log-sum-exp [H, T] of the scores, both in the wide type.

    A query that sees no key has output 0 and log-sum-exp -inf. O(H x T x S) memory.
    """
    scores = _scores(q_HTD, k_GSD, mask_TS, scale)
    lse = scores.logsumexp(-1)
    y = _weights(scores, lse[..., None]) @ v_GSD.to(scores.dtype)[:, None]
    return y.flatten(0, 1), lse.flatten(0, 1)


def attend_backward(
    dy_HTD: Tensor,
    forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    mask_TS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [H, T, D], keys and values [G, S, D], in the wide type.

    Source: Dao et al. 2022, "FlashAttention", appendix B.4.

    Args:
        dy_HTD: gradient of the output.
        forward: queries, keys, values, and the output and log-sum-exp over all keys that the queries
            attended to, of which these keys may be a part.
        mask_TS: True where a query sees a key.
        scale: of the scores.
    """
    q_HTD, k_GSD, v_GSD, y_HTD, lse_HT = forward
    heads = (k_GSD.shape[0], -1)
    scores = _scores(q_HTD, k_GSD, mask_TS, scale)
    p = _weights(scores, lse_HT.unflatten(0, heads)[..., None])
    q, dy, y = (x.to(p.dtype).unflatten(0, heads) for x in (q_HTD, dy_HTD, y_HTD))
    k, v = (x.to(p.dtype)[:, None] for x in (k_GSD, v_GSD))
    dv = (p.transpose(-1, -2) @ dy).sum(1)
    dscores = p * (dy @ v.transpose(-1, -2) - (dy * y).sum(-1, keepdim=True)) * scale
    dq = (dscores @ k).flatten(0, 1)
    dk = (dscores.transpose(-1, -2) @ q).sum(1)
    return dq, dk, dv


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine output and log-sum-exp of the same queries over two sets of keys."""
    lse_HT = torch.logaddexp(one[1], other[1])
    y_HTD = torch.zeros_like(one[0])
    for part_HTD, part_HT in (one, other):
        y_HTD += part_HTD * _weights(part_HT, lse_HT)[..., None]
    return y_HTD, lse_HT


def _scores(q_HTD: Tensor, k_GSD: Tensor, mask_TS: Tensor, scale: float) -> Tensor:
    """[G, H / G, T, S], -inf where a query does not see a key."""
    dtype = wide(q_HTD.dtype)
    q = q_HTD.to(dtype).unflatten(0, (k_GSD.shape[0], -1))
    scores = (q @ k_GSD.to(dtype)[:, None].transpose(-1, -2)) * scale
    return scores.masked_fill_(~mask_TS, float("-inf"))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 where no key is seen and both are -inf."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp()


class View(NamedTuple):
    """The mask of queries over keys, and the scale of scores."""

    mask: AttentionMask
    window: int | None
    scale: float


def view_forward(q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and log-sum-exp [H, T]; 0 and -inf for a query that sees no key.

    Raises:
        ValueError: the kernels do not support the head width or dtype; there is no fallback on a GPU.
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
