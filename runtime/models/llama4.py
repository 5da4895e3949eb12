"""Parts of a Llama 4 layer that run on packed items: attention with complex rotations, routed experts."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import (
    Llama4TextAttention,
    Llama4TextExperts,
    Llama4TextMoe,
    Llama4VisionAttention,
)

from runtime.models.attention import packed_sdpa
from runtime.models.grouped import Orientation
from runtime.models.mixture import SHARED_EXPERT, Choice, Experts, Mixture
from runtime.models.norm import replace_parts

# Shape suffixes: S, T = packed tokens, H = heads, D = width, X = experts, K = experts per token.


def turned(x_1THD: Tensor, angles_1TD: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) by complex numbers, in the wider of float32 and the input's type.

    Differs: transformers rounds float64 inputs to float32, see `WideRMSNorm`.
    """
    wide = x_1THD.to(torch.promote_types(x_1THD.dtype, torch.float32))
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles_1TD[:, :, None]).flatten(3).to(x_1THD.dtype)


def scaled_to_one(x: Tensor, eps: float) -> Tensor:
    """`x` divided by the root of its mean square, without weights."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def projected(attention: Any, x_1TD: Tensor) -> tuple[Tensor, ...]:
    """[1, T, H, D] of queries, keys and values."""
    products = (attention.q_proj, attention.k_proj, attention.v_proj)
    return tuple(product(x_1TD).unflatten(-1, (-1, attention.head_dim)) for product in products)


class PackedAttention(nn.Module):
    """Llama 4's attention by its own matmuls; positions are those within each item.

    Layers without rotations scale their queries by position from `floor_scale` on; items that long are
    refused, so the factor is 1.
    """

    is_causal = True

    def __init__(self, attention: Llama4TextAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.head_dim: int = attention.head_dim
        self.rotates = bool(attention.use_rope)
        self.eps: float | None = attention.qk_norm.eps if hasattr(attention, "qk_norm") else None

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Any, **_: object
    ) -> tuple[Tensor, None]:
        """[1, T, D] and None (no attention weights)."""
        q_1THD, k_1THD, v_1THD = projected(self, hidden_states)
        if self.rotates:
            q_1THD, k_1THD = (turned(x, position_embeddings) for x in (q_1THD, k_1THD))
        if self.eps is not None:
            q_1THD, k_1THD = (scaled_to_one(x, self.eps) for x in (q_1THD, k_1THD))
        q_1HTD, k_1HTD, v_1HTD = (x.transpose(1, 2) for x in (q_1THD, k_1THD, v_1THD))
        y_1THD = packed_sdpa(self, q_1HTD, k_1HTD, v_1HTD, attention_mask)[0]
        return self.o_proj(y_1THD.flatten(2)), None


class PatchAttention(nn.Module):
    """Attention of its tower: all layers rotate, and all patches of an image see each other."""

    is_causal = False

    def __init__(self, attention: Llama4VisionAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.head_dim: int = attention.head_dim

    def forward(self, hidden_states: Tensor, freqs_ci: Tensor, attention_mask: Any) -> tuple[Tensor, None]:
        """[1, T, D] and None; arguments are named as in transformers' layers."""
        q_1THD, k_1THD, v_1THD = projected(self, hidden_states)
        each = (turned(q_1THD, freqs_ci), turned(k_1THD, freqs_ci), v_1THD)
        q_1HTD, k_1HTD, v_1HTD = (x.transpose(1, 2) for x in each)
        y_1THD = packed_sdpa(self, q_1HTD, k_1HTD, v_1HTD, attention_mask)[0]
        return self.o_proj(y_1THD.flatten(2)), None


class Llama4Mixture(Mixture):
    """A shared expert for all tokens, and others whose inputs are tokens times the sigmoid of their score.

    Differs: transformers runs every expert on every token, times zero where it is not chosen.
    """

    def choose(self, x_SD: Tensor) -> Choice:
        score_SX = nn.functional.linear(x_SD, self.module.router.weight)
        best_SK, chosen_SK = score_SX.topk(self.module.top_k, dim=-1)
        wide_SK = best_SK.to(torch.promote_types(best_SK.dtype, torch.float32)).sigmoid()
        return Choice(chosen_SK, before=wide_SK.to(best_SK.dtype))

    @property
    def for_all(self) -> nn.Module | None:
        expert: nn.Module = self.module.get_submodule(SHARED_EXPERT)
        return expert

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        del like
        return self.module.total(y_TD), None


def adapt(layer: nn.Module) -> None:
    """Replace transformers' attention and experts in a layer by these, with the same names of weights."""
    replace_parts(layer, Llama4TextAttention, PackedAttention)
    replace_parts(layer, Llama4TextExperts, lambda experts: Experts(experts, Orientation.IN_OUT))
    for module in layer.modules():
        if isinstance(module, Llama4TextMoe):
            module.total = nn.Identity()  # where ranks with parts of experts sum
