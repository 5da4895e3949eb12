"""Attention of some queries over some keys in plain PyTorch, forward and backward.

The blocks that distributed attention is made of: what leaves a forward (the output and the
log-sum-exp of its scores) is enough to run its backward, or to merge it with other keys' share.
"""

import torch
from torch import Tensor

# Shape suffixes: T = queries, S = keys, H = query heads, G = key/value heads (G divides H), D = head width.


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are held in: float32, or float64 where the inputs are."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor, mask_TS: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and log-sum-exp [H, T] of the scores, both wide.

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
    """Wide gradients of queries [H, T, D], keys and values [G, S, D].

    Source: Dao et al. 2022, "FlashAttention", appendix B.4.

    Args:
        dy_HTD: of the output.
        forward: queries, keys, values, and the output and log-sum-exp over all keys that the
            queries attended to; these keys may be a part of them.
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
    """Output and log-sum-exp of the same queries over both sets of keys."""
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
    """exp(scores - lse), and 0 where nothing is seen: both are -inf there."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
