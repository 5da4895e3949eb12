"""All-to-all (Ulysses) attention: ranks exchange tokens for heads, so that each sees whole sequences.

A baseline: it needs at least as many heads of keys and values as ranks, and costs each rank the same under
any mask, because a rank has all tokens of its heads.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.models.attention_mask import AttentionMask
from runtime.parallel.context.gathered import check_members
from runtime.parallel.context.group import ContextGroup
from runtime.parallel.context.token_shares import TokenShares
from runtime.parallel.linear_map import mapped

# Shape suffixes: T = own tokens, S = tokens of all members, H = heads, M = members, D = head width.


@dataclass(frozen=True, slots=True)
class AllToAllAttention:
    """Attention of one microbatch on one rank; shares and group as in `GatheredAttention`.

    `mask` is of all members' tokens, ordered by member: see `all_to_all_attention`.
    """

    shares: TokenShares
    group: ContextGroup
    mask: AttentionMask

    def __post_init__(self) -> None:
        check_members(self.shares, self.group)

    def attend(
        self,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[H, T, D] of this rank's tokens.

        Raises:
            ValueError: the number of members does not divide the heads of keys and values.
        """
        if k_GTD.shape[0] % self.group.size:
            raise ValueError(
                f"all-to-all attention: ranks must divide the {k_GTD.shape[0]} key/value heads, "
                f"got {self.group.size} ranks"
            )
        q, k, v = (mapped(x, self._to_heads, self._to_tokens) for x in (q_HTD, k_GTD, v_GTD))
        own = None if sinks is None else sinks.chunk(self.group.size)[self.shares.member]
        y = self.mask.attend(q, k, v, scale=scale, window=window, sinks=own)
        return mapped(y, self._to_tokens, self._to_heads)

    def _to_heads(self, x_HTD: Tensor) -> Tensor:
        """All tokens of own heads [H / M, S, D], from own tokens of all heads [H, T, D]."""
        members, counts = self.group.size, list(self.shares.num_held)
        num_heads, num_own, width = x_HTD.shape
        by_member = x_HTD.reshape(members, num_heads // members, num_own, width)
        sent = by_member.transpose(1, 2).flatten(0, 1).contiguous()
        received = sent.new_empty((sum(counts), *sent.shape[1:]))
        self.group.exchange(received, sent, (counts, [num_own] * members)).wait()
        return received.transpose(0, 1)

    def _to_tokens(self, x_HSD: Tensor) -> Tensor:
        """The inverse of `_to_heads`, and its transpose."""
        members, counts = self.group.size, list(self.shares.num_held)
        num_own = counts[self.shares.member]
        sent = x_HSD.transpose(0, 1).contiguous()
        received = sent.new_empty((members * num_own, *sent.shape[1:]))
        self.group.exchange(received, sent, ([num_own] * members, counts)).wait()
        by_member = received.reshape(members, num_own, *received.shape[1:])
        return by_member.transpose(1, 2).flatten(0, 1)


def all_to_all_attention(
    shares: TokenShares, group: ContextGroup, device: torch.device | str
) -> AllToAllAttention:
    """Attention with the mask of all tokens, ordered by member."""
    fields = shares.fields(np.concatenate(shares.held))
    return AllToAllAttention(shares, group, AttentionMask(fields, fields, torch.device(device)))
