"""Tokens of an encoder brought together where its last layer shrinks runs of them that ranks share."""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from runtime.parallel.context.block import wide
from runtime.parallel.context.group import ContextGroup
from runtime.parallel.context.token_shares import Places, TokenShares, rows_of
from runtime.parallel.linear_map import mapped

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
            return mapped(x_TD, self._gathered, partial(self._summed, num_own=len(x_TD)))
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

    def _gathered(self, x_TD: Tensor) -> Tensor:
        """Everybody's tokens."""
        shares, width = self.shares, x_TD.shape[1]
        own_ND = x_TD.new_zeros(shares.most_held, width)
        own_ND[: len(x_TD)] = x_TD
        gathered = own_ND.new_empty(shares.num_members * shares.most_held, width)
        self.group.gather(gathered, own_ND).wait()
        places = self.padded.to(x_TD.device)
        return x_TD.new_zeros(len(shares.mask) + 1, width).index_copy(0, places, gathered)[:-1]

    def _summed(self, gradient_SD: Tensor, num_own: int) -> Tensor:
        """Gradients of the own tokens, summed over the members in float32 or wider."""
        filler = gradient_SD.new_zeros(1, gradient_SD.shape[1])
        places = self.padded.to(gradient_SD.device)
        parts = torch.cat([gradient_SD, filler]).index_select(0, places).to(wide(gradient_SD.dtype))
        own_ND = parts.new_empty(self.shares.most_held, parts.shape[1])
        self.group.scatter(own_ND, parts).wait()
        return own_ND[:num_own].to(gradient_SD.dtype)
