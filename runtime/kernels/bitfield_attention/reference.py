"""What bitfield attention means: plain PyTorch on a dense mask, any device, any float dtype."""

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.mask import TokenFields

# Shape suffixes: B = batch, H = query heads, G = key/value heads, Q = queries, K = keys, D = head width.


def attends(queries: TokenFields, keys: TokenFields) -> Tensor:
    """bool [Q, K]: which query sees which key. The specification, pair by pair."""
    position_1K, own_1K = keys.position[None], keys.own[None]
    same_QK = (queries.segment[:, None] == keys.segment[None]) & (keys.segment[None] >= 0)
    group_QK = (queries.allow[:, None] & own_1K) != 0
    past_QK = ~queries.causal[:, None] | (position_1K <= queries.position[:, None])
    past_QK &= position_1K <= queries.last[:, None]
    sink_QK = (queries.always[:, None] & own_1K) != 0
    return same_QK & group_QK & past_QK & ((position_1K >= queries.first[:, None]) | sink_QK)


def attention(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, attends_QK: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the attended keys, in the dtype of its inputs; differentiable.

    Returns:
        out [B, H, Q, D] and the natural-log sum of exponentials [B, H, Q]. A query that attends
        to nothing has output 0, log-sum -inf and gives no gradient.

    Memory: O(B H Q K).
    """
    group = q_BHQD.shape[1] // k_BGKD.shape[1]
    k_BHKD, v_BHKD = (x.repeat_interleave(group, dim=1) for x in (k_BGKD, v_BGKD))
    scale = q_BHQD.shape[-1] ** -0.5 if scale is None else scale
    score = (q_BHQD @ k_BHKD.mT) * scale
    score = score.masked_fill(~attends_QK, torch.finfo(score.dtype).min)
    any_Q1 = attends_QK.any(-1, keepdim=True)
    out = (torch.softmax(score, dim=-1) * any_Q1) @ v_BHKD
    return out, torch.logsumexp(score, dim=-1).masked_fill(~any_Q1[:, 0], -torch.inf)
