"""Context-parallel attention: keys and values of all tokens are gathered, queries stay on their rank.

Every rank has an arbitrary list of tokens. Heads of keys and values are gathered in chunks, the next one
while the current one is computed; at most two are in memory. The backward gathers again instead of keeping
gathered chunks, and sums the gradients of keys and values over the ranks by reduce-scatter, in float32 or
wider, while the next chunk is computed.

Order on a GPU. A collective waits for the work in the current stream when it is issued, and `wait` makes
the current stream wait for the collective. So a message is complete when it is sent (the current stream
wrote it, also where keys and values are results of kernels just launched), a result is complete when it is
read (after `wait`, never before), and no buffer is reused: each chunk has its own, freed when the current
stream has finished with it.

Source: Cornstarch (ICML) section 4.3.2, all-gather of keys and values by heads.
Differs: as many heads at a time as fill a GPU, not one; tokens are padded to the longest list rather than
exchanged in unequal messages; padding is masked out like any token that no query sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.models import attention_mask
from runtime.models.attention_mask import AttentionMask, View
from runtime.models.dense_attention import wide
from runtime.models.sinks import sink_gradient, with_sinks
from runtime.parallel.context.group import ContextGroup, Pending
from runtime.parallel.context.token_shares import TokenShares
from workbench.plan.gathered_heads import heads_per_gather

# Shape suffixes: T = own tokens, N = tokens of the longest list, M = members, S = M x N keys,
# H = query heads, G = key/value heads, C = key/value heads of one chunk, D = head width.


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """Attention of one microbatch on one rank of a context-parallel group.

    Args:
        shares: the tokens of each rank.
        group: the ranks, in the order of the shares.
        mask: of this rank's tokens over all tokens, see `gathered_attention`.
        chunk_heads: heads of keys and values gathered at a time; None: see `_chunk_heads`.

    Raises:
        ValueError: the group has another number of members than the shares, or chunk_heads < 1.
    """

    shares: TokenShares
    group: ContextGroup
    mask: AttentionMask
    chunk_heads: int | None = None

    def __post_init__(self) -> None:
        check_members(self.shares, self.group)
        if self.chunk_heads is not None and self.chunk_heads < 1:
            raise ValueError(f"chunks must be of >= 1 head, got {self.chunk_heads}")

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
        """[H, T, D] of this rank's tokens; a collective of the group, as is its backward."""
        call = _Call(self, View(self.mask, window, scale))
        output: Tensor = _Gathered.apply(q_HTD, k_GTD, v_GTD, sinks, call)
        return output


def gathered_attention(
    shares: TokenShares, group: ContextGroup, device: torch.device | str
) -> GatheredAttention:
    """Attention with its mask prepared before the first step."""
    queries, keys = shares.fields(shares.own), shares.fields(shares.padded())
    mask = AttentionMask(queries, keys, torch.device(device))
    mask.prepare()
    return GatheredAttention(shares, group, mask)


def check_members(shares: TokenShares, group: ContextGroup) -> None:
    """Raise ValueError unless shares and group have the same members."""
    if (shares.num_members, shares.member) != (group.size, group.member):
        raise ValueError(
            f"token shares of member {shares.member} of {shares.num_members} do not fit "
            f"a group where this is member {group.member} of {group.size}"
        )


class _Call(NamedTuple):
    attention: GatheredAttention
    view: View


class _Chunk(NamedTuple):
    """Some heads of all ranks' keys and values."""

    heads: slice  # of keys and values
    queries: slice  # the query heads that read them
    keys: Tensor  # [C, S, D]
    values: Tensor  # [C, S, D]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, sink_H: Tensor | None, call: _Call
    ) -> Tensor:
        y_HTD = torch.empty_like(q_HTD)
        lse_HT = q_HTD.new_empty(q_HTD.shape[:2], dtype=wide(q_HTD.dtype))
        for chunk in _chunks(q_HTD, k_GTD, v_GTD, call.attention):
            heads = chunk.queries
            part = call.view.forward(q_HTD[heads], chunk.keys, chunk.values)
            own = None if sink_H is None else sink_H[heads]
            y_HTD[heads], lse_HT[heads] = with_sinks(*part, own)
        ctx.save_for_backward(q_HTD, k_GTD, v_GTD, y_HTD, lse_HT, sink_H)
        ctx.call = call
        return y_HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_HTD: Tensor) -> tuple[Tensor | None, ...]:
        q_HTD, k_GTD, v_GTD, y_HTD, lse_HT, sink_H = ctx.saved_tensors
        call: _Call = ctx.call
        dq_HTD = torch.empty_like(q_HTD)
        sums = _Sums(call.attention, k_GTD)
        for chunk in _chunks(q_HTD, k_GTD, v_GTD, call.attention):
            heads = chunk.queries
            saved = (q_HTD[heads], chunk.keys, chunk.values, y_HTD[heads], lse_HT[heads])
            dq_HTD[heads], dk, dv = call.view.backward(dy_HTD[heads], saved)
            sums.add(chunk.heads, dk, dv)
        dk_GTD, dv_GTD = sums.finish()
        return dq_HTD, dk_GTD, dv_GTD, sink_gradient(dy_HTD, y_HTD, lse_HT, sink_H), None


def _chunks(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, attention: GatheredAttention) -> Iterator[_Chunk]:
    """Yield chunks, each complete, while the next one is being gathered."""
    group_heads = q_HTD.shape[0] // k_GTD.shape[0]
    step = attention.chunk_heads or _chunk_heads(q_HTD, k_GTD, attention.shares)
    heads = [slice(first, first + step) for first in range(0, k_GTD.shape[0], step)]
    coming = _gather(k_GTD[heads[0]], v_GTD[heads[0]], attention)
    for index, chunk in enumerate(heads):
        pending, keys_values = coming
        if index + 1 < len(heads):
            following = heads[index + 1]
            coming = _gather(k_GTD[following], v_GTD[following], attention)
        pending.wait()
        k_CSD, v_CSD = keys_values.permute(1, 2, 0, 3)
        queries = slice(chunk.start * group_heads, (chunk.start + len(k_CSD)) * group_heads)
        yield _Chunk(chunk, queries, k_CSD, v_CSD)


def _chunk_heads(q_HTD: Tensor, k_GTD: Tensor, shares: TokenShares) -> int:
    """Heads per chunk; 1 where scores are materialised, as their memory grows with the heads."""
    if not attention_mask.uses_kernels(q_HTD.device):
        return 1
    return heads_per_gather(q_HTD.shape[0], k_GTD.shape[0], shares.most_held)


def _gather(k_CTD: Tensor, v_CTD: Tensor, attention: GatheredAttention) -> tuple[Pending, Tensor]:
    """A gather in flight, and its buffer [S, 2, C, D], with zeros as padding."""
    shares = attention.shares
    num_heads, num_tokens, width = k_CTD.shape
    own = k_CTD.new_zeros((shares.most_held, 2, num_heads, width))
    own[:num_tokens, 0] = k_CTD.transpose(0, 1)
    own[:num_tokens, 1] = v_CTD.transpose(0, 1)
    gathered = own.new_empty((shares.num_members * shares.most_held, 2, num_heads, width))
    return attention.group.gather(gathered, own), gathered


class _Sums:
    """Gradients of this rank's keys and values, summed over the ranks by chunk."""

    def __init__(self, attention: GatheredAttention, like_GTD: Tensor) -> None:
        self._attention = attention
        self._dk_GTD, self._dv_GTD = torch.empty_like(like_GTD), torch.empty_like(like_GTD)
        self._out: tuple[Pending, slice, Tensor, Tensor] | None = None

    def add(self, heads: slice, dk_CSD: Tensor, dv_CSD: Tensor) -> None:
        """Start summing a chunk's gradients of all ranks' keys and values."""
        parts = torch.stack((dk_CSD, dv_CSD)).permute(2, 0, 1, 3).contiguous()  # [S, 2, C, D]
        parts = parts.to(wide(parts.dtype))
        own = parts.new_empty((self._attention.shares.most_held, *parts.shape[1:]))
        pending = self._attention.group.scatter(own, parts)
        self._take()
        self._out = pending, heads, own, parts

    def finish(self) -> tuple[Tensor, Tensor]:
        """Both gradients [G, T, D], in the type of keys and values."""
        self._take()
        return self._dk_GTD, self._dv_GTD

    def _take(self) -> None:
        if self._out is None:
            return
        pending, heads, own, _ = self._out
        pending.wait()
        num_tokens = self._dk_GTD.shape[1]
        self._dk_GTD[heads] = own[:num_tokens, 0].transpose(0, 1).to(self._dk_GTD.dtype)
        self._dv_GTD[heads] = own[:num_tokens, 1].transpose(0, 1).to(self._dv_GTD.dtype)
        self._out = None
