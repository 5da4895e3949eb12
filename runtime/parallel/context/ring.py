"""Ring attention: blocks of keys and values circulate among the ranks while each computes.

A baseline: after as many steps as ranks every query has seen every key. A step takes as long as its slowest
rank, so masked blocks save time only where all ranks skip one in the same step; blocks of which a rank sees
nothing are not computed. In the backward the gradients of keys and values circulate with them, and are back
at their rank after the last step.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers", Algorithm 1.
Differs: any mask and any token lists, padded to the longest; the papers' are causal or full.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.models.attention_mask import AttentionMask, View
from runtime.models.dense_attention import wide
from runtime.models.sinks import sink_gradient, with_sinks
from runtime.parallel.context.block import is_empty, merge
from runtime.parallel.context.gathered import check_members
from runtime.parallel.context.group import ContextGroup, Pending
from runtime.parallel.context.token_shares import TokenShares
from workbench.masks.bitfield import NO_LIMIT
from workbench.masks.builders import narrowed

# Shape suffixes: T = own tokens, N = tokens of the longest list, H = query heads,
# G = key/value heads, D = head width.


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention of one microbatch on one rank; shares and group as in `GatheredAttention`."""

    shares: TokenShares
    group: ContextGroup
    device: torch.device
    _views: dict[int, AttentionMask | None] = field(default_factory=dict, repr=False, compare=False)

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
        """[H, T, D] of the own tokens; a collective of the group, as is its backward."""
        output: Tensor = _Ring.apply(q_HTD, k_GTD, v_GTD, sinks, _Call(self, window, scale))
        return output

    def block(self, step: int) -> int:
        """The member whose keys are present at a step: first this one's, then the previous member's."""
        return (self.shares.member - step) % self.group.size

    def view(self, member: int, window: int | None, scale: float) -> View | None:
        """The view of that member's keys; None where no layer's queries of this rank see any of them."""
        if member not in self._views:
            queries, keys = (self.shares.fields(x) for x in (self.shares.own, self.shares.held[member]))
            made = AttentionMask(queries, keys, self.device)
            self._views[member] = None if all(map(is_empty, (made, _in_windows(made)))) else made
        mask = self._views[member]
        return None if mask is None else View(mask, window, scale)


def _in_windows(mask: AttentionMask) -> AttentionMask:
    """The mask of a layer whose window hides nothing, but shows what only layers with one see."""
    return replace(mask, queries=narrowed(mask.queries, NO_LIMIT), _dense={}, _planned={})


def ring_attention(shares: TokenShares, group: ContextGroup, device: torch.device | str) -> RingAttention:
    """Attention over circulating blocks."""
    return RingAttention(shares, group, torch.device(device))


class _Call(NamedTuple):
    attention: RingAttention
    window: int | None
    scale: float


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, sink_H: Tensor | None, call: _Call
    ) -> Tensor:
        ring, dtype = call.attention, wide(q_HTD.dtype)
        y_HTD = q_HTD.new_zeros(q_HTD.shape, dtype=dtype)
        lse_HT = y_HTD.new_full(y_HTD.shape[:2], float("-inf"))
        block = _padded(torch.stack((k_GTD, v_GTD)), ring)
        for step in range(ring.group.size):
            following, moves = _next_block(ring, block, step)
            view = ring.view(ring.block(step), call.window, call.scale)
            if view is not None:
                k, v = block[:, :, : len(view.mask.keys)]
                y_HTD, lse_HT = merge((y_HTD, lse_HT), view.forward(q_HTD, k, v))
            for move in moves:
                move.wait()
            block = following
        y_HTD, lse_HT = with_sinks(y_HTD, lse_HT, sink_H)
        output = y_HTD.to(q_HTD.dtype)
        ctx.save_for_backward(q_HTD, k_GTD, v_GTD, output, lse_HT, sink_H)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_HTD: Tensor) -> tuple[Tensor | None, ...]:
        q_HTD, k_GTD, v_GTD, y_HTD, lse_HT, sink_H = ctx.saved_tensors
        call: _Call = ctx.call
        ring = call.attention
        block = _padded(torch.stack((k_GTD, v_GTD)), ring)
        dq_HTD = torch.zeros_like(q_HTD, dtype=wide(q_HTD.dtype))
        sums = torch.zeros_like(block, dtype=dq_HTD.dtype)  # of the current block
        for step in range(ring.group.size):
            following, moves = _next_block(ring, block, step)
            view = ring.view(ring.block(step), call.window, call.scale)
            if view is not None:
                k, v = block[:, :, : len(view.mask.keys)]
                dq, dk, dv = view.backward(dy_HTD, (q_HTD, k, v, y_HTD, lse_HT))
                dq_HTD += dq
                sums[:, :, : len(view.mask.keys)] += torch.stack((dk, dv))
            passed = torch.empty_like(sums)
            for move in (*moves, *ring.group.pass_on(passed, sums)):
                move.wait()
            block, sums = following, passed
        dk_GTD, dv_GTD = sums[:, :, : k_GTD.shape[1]].to(k_GTD.dtype)
        of_sinks = sink_gradient(dy_HTD, y_HTD, lse_HT, sink_H)
        return dq_HTD.to(q_HTD.dtype), dk_GTD, dv_GTD, of_sinks, None


def _next_block(ring: RingAttention, block: Tensor, step: int) -> tuple[Tensor, tuple[Pending, ...]]:
    """Start to pass the block on; returns the buffer of the next one and its transfers, none at the end."""
    if step + 1 == ring.group.size:
        return block, ()
    following = torch.empty_like(block)
    return following, ring.group.pass_on(following, block)


def _padded(keys_values: Tensor, ring: RingAttention) -> Tensor:
    """[2, G, N, D]."""
    missing = ring.shares.most_held - keys_values.shape[2]
    return torch.nn.functional.pad(keys_values, (0, 0, 0, missing))
