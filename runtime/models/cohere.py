"""Attention that rotates pairs of neighbours, of Cohere 2 and ERNIE 4.5; Cohere 2's norms without a shift."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.cohere2.modeling_cohere2 import Cohere2Attention, Cohere2LayerNorm
from transformers.models.cohere_compass.modeling_cohere_compass import CohereCompassLayerNorm

from runtime.models.attention import packed_sdpa
from runtime.models.norm import replace_parts

# Shape suffixes: T = packed tokens, H = heads, D = head width.


def turned(x_1THD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) by angles whose cosines and sines stand twice each.

    In the wider of float32 and the input's type. Differs: transformers rounds float64 inputs to float32, see
    `WideRMSNorm`.
    """
    wide = x_1THD.to(torch.promote_types(x_1THD.dtype, torch.float32))
    across = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
    return (wide * cos_1TD[:, :, None] + across * sin_1TD[:, :, None]).to(x_1THD.dtype)


class PairedAttention(nn.Module):
    """Attention whose heads rotate pairs of neighbours.

    Args:
        attention: transformers' own.
        rotates: whether the layer knows positions.
        window: tokens that a query sees; None: all before it.
    """

    is_causal = True

    def __init__(self, attention: Any, *, rotates: bool = True, window: int | None = None) -> None:
        super().__init__()
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.head_dim: int = attention.head_dim
        self.rotates = rotates
        self.sliding_window = window

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        **_: object,
    ) -> tuple[Tensor, None]:
        """[1, T, D] and None (no attention weights)."""
        products = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (product(hidden_states).unflatten(-1, (-1, self.head_dim)) for product in products)
        if self.rotates:
            q, k = turned(q, *position_embeddings), turned(k, *position_embeddings)
        q_1HTD, k_1HTD, v_1HTD = (x_1THD.transpose(1, 2) for x_1THD in (q, k, v))
        y_1THD, _none = packed_sdpa(
            self, q_1HTD, k_1HTD, v_1HTD, attention_mask, sliding_window=self.sliding_window
        )
        return self.o_proj(y_1THD.flatten(2)), None


def _plain_norm(norm: Any) -> nn.LayerNorm:
    """torch's own, in one kernel; transformers' rounds float64 to float32, and keeps more of it."""
    with norm.weight.device:
        return nn.LayerNorm(norm.weight.shape[0], eps=norm.variance_epsilon, bias=False)


def _cohere_attention(attention: Any) -> PairedAttention:
    """Layers with a sliding window rotate, those without one know no positions."""
    window = attention.sliding_window
    return PairedAttention(attention, rotates=window is not None, window=window)


def adapt_norms(layer: nn.Module) -> None:
    """Replace transformers' norms of Compass in a layer, with the same names of weights."""
    replace_parts(layer, CohereCompassLayerNorm, _plain_norm)


def adapt(layer: nn.Module) -> None:
    """Replace transformers' attention and norms in a layer by these, with the same names of weights."""
    replace_parts(layer, Cohere2Attention, _cohere_attention)
    replace_parts(layer, Cohere2LayerNorm, _plain_norm)
