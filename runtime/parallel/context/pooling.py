"""Tokens of an encoder brought together where its last layer shrinks runs of them that ranks share."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.parallel.context.block import wide
from runtime.parallel.context.group import ContextGroup
from runtime.parallel.context.token_shares import Places, TokenShares, rows_of

# Shape suffixes: T = own tokens, S = tokens of all members, N = tokens of the longest list,
# M = members, D = width.


@dataclass(frozen=True)
class SharedPooling:
    """One member's view of an encoder's last layer; shares and group as in `GatheredAttention`.

    Where no run that is averaged crosses a border between members, nothing travels.

    Args:
        inputs: by member, places of the tokens that its outputs are made of.
        outputs: places of the own outputs, -1 for padding.
    """

    shares: TokenShares
    group: ContextGroup
    inputs: tuple[Places, ...]
    outputs: Tensor

    @cached_property
    def is_local(self) -> bool:
        """Whether every member has all it needs: the same answer on each of them."""
        return all(np.isin(*pair).all() for pair in zip(self.inputs, self.shares.owned, strict=True))

    def whole(self, x_TD: Tensor) -> Tensor:
        """[S, D] out of [T, D]; zeros for tokens of others that nobody here needs."""
        if not self.is_local:
            gathered: Tensor = _Gathered.apply(x_TD, self)
            return gathered
        places = torch.from_numpy(self.shares.own).to(x_TD.device)
        num_tokens = len(self.shares.mask)
        return x_TD.new_zeros(num_tokens + 1, x_TD.shape[1]).index_copy(0, places, x_TD)[:num_tokens]

    def own(self, y_TD: Tensor) -> Tensor:
        """The own outputs out of those of all members."""
        return rows_of(y_TD, self.outputs.to(y_TD.device))

    @cached_property
    def padded(self) -> Tensor:
        """[M x N] places of what is gathered; S for padding."""
        return torch.from_numpy(self.shares.padded())


class _Gathered(torch.autograd.Function):
    """Everybody's tokens; gradients are summed over the members in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, pooling: SharedPooling) -> Tensor:
        ctx.pooling, ctx.num_own = pooling, len(x_TD)
        shares, width = pooling.shares, x_TD.shape[1]
        own_ND = x_TD.new_zeros(shares.most_held, width)
        own_ND[: len(x_TD)] = x_TD
        gathered = own_ND.new_empty(shares.num_members * shares.most_held, width)
        pooling.group.gather(gathered, own_ND).wait()
        places = pooling.padded.to(x_TD.device)
        whole = x_TD.new_zeros(len(shares.mask) + 1, width).index_copy(0, places, gathered)
        return whole[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor, None]:
        pooling: SharedPooling = ctx.pooling
        shares = pooling.shares
        filler = gradient_SD.new_zeros(1, gradient_SD.shape[1])
        places = pooling.padded.to(gradient_SD.device)
        parts = torch.cat([gradient_SD, filler]).index_select(0, places).to(wide(gradient_SD.dtype))
        own_ND = parts.new_empty(shares.most_held, parts.shape[1])
        pooling.group.scatter(own_ND, parts).wait()
        return own_ND[: ctx.num_own].to(gradient_SD.dtype), None
