"""Attention with all scores of its tokens in memory, by passes of its own: output and log-sum-exp, gradients.

The log-sum-exp suffices to run the backward, to merge an output with that over other keys, and to add what
only the denominator of the softmax has (`runtime.models.sinks`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

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
    y = _powers(scores, lse) @ v_GSD.to(scores.dtype)[:, None]
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
    p = _powers(_scores(q_HTD, k_GSD, mask_TS, scale), lse_HT.unflatten(0, heads))
    q, dy, y = (x.to(p.dtype).unflatten(0, heads) for x in (q_HTD, dy_HTD, y_HTD))
    k, v = (x.to(p.dtype)[:, None] for x in (k_GSD, v_GSD))
    dv = (p.transpose(-1, -2) @ dy).sum(1)
    dscores = (dy @ v.transpose(-1, -2)).sub_((dy * y).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    dq = (dscores @ k).flatten(0, 1)
    dk = (dscores.transpose(-1, -2) @ q).sum(1)
    return dq, dk, dv


class DenseKernel(NamedTuple):
    """Attention of N items of one length under one mask, as a kernel that takes sinks.

    Args:
        mask: makes it, [T, T] True where a query sees a key; either pass does, so that none is kept between.
        scale: of the scores.
    """

    mask: Callable[[], Tensor]
    scale: float

    def forward(self, q_NHTD: Tensor, k_NGTD: Tensor, v_NGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [N, H, T, D] and log-sum-exp [N, H, T], in the wide type."""
        q, k, v = (x.flatten(0, 1) for x in (q_NHTD, k_NGTD, v_NGTD))
        y, lse = attend(q, k, v, self.mask(), self.scale)
        return y.unflatten(0, q_NHTD.shape[:2]), lse.unflatten(0, q_NHTD.shape[:2])

    def backward(
        self, dy_NHTD: Tensor, forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, in the wide type."""
        q, k, v, y, lse = (x.flatten(0, 1) for x in forward)
        dq, dk, dv = attend_backward(dy_NHTD.flatten(0, 1), (q, k, v, y, lse), self.mask(), self.scale)
        queries, keys = forward[0].shape[:2], forward[1].shape[:2]
        return dq.unflatten(0, queries), dk.unflatten(0, keys), dv.unflatten(0, keys)


def weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 where no key is seen and both are -inf."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp()


def _scores(q_HTD: Tensor, k_GSD: Tensor, mask_TS: Tensor, scale: float) -> Tensor:
    """[G, H / G, T, S], -inf where a query does not see a key."""
    dtype = wide(q_HTD.dtype)
    q = q_HTD.to(dtype).unflatten(0, (k_GSD.shape[0], -1))
    scores = (q @ k_GSD.to(dtype)[:, None].transpose(-1, -2)).mul_(scale)
    return scores.masked_fill_(~mask_TS, float("-inf"))


def _powers(scores: Tensor, lse: Tensor) -> Tensor:
    """As `weights_of`, in the memory of the scores."""
    return scores.sub_(lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp_()
