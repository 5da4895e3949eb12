"""Attention of a whole microbatch under any mask, on one rank."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from runtime.token_shares import TokenShares

# Shape suffixes: T = tokens, H = query heads, G = key/value heads, D = head width.


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """PyTorch's attention with the mask written out: O(T x T) memory, exact on any device.

    Args:
        shares: of one member, which holds all tokens.
    """

    shares: TokenShares
    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def attend(
        self, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, scale: float, window: int | None = None
    ) -> Tensor:
        """[H, T, D]; a query without a key gives 0."""
        if window not in self._masks:
            visible = self.shares.visible(self.shares.own, self.shares.own, window)
            self._masks[window] = torch.from_numpy(visible).to(q_HTD.device)
        return functional.scaled_dot_product_attention(
            q_HTD[None],
            k_GTD[None],
            v_GTD[None],
            attn_mask=self._masks[window],
            scale=scale,
            enable_gqa=q_HTD.shape[0] != k_GTD.shape[0],
        )[0]
