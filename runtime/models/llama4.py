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
from runtime.models.mixture import SHARED_EXPERT, Choice, Mixture
from runtime.models.norm import replace_parts

# Shape suffixes: T = packed tokens, N = those of one expert, H = heads, D = width, X = experts, K = experts
# per token.


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


class RoutedExperts(nn.Module):
    """Experts, K of them per token, with transformers' names of weights; only chosen ones run."""

    inner_dims = (2, 1)  # of both weights: the dim of an expert's inner features

    def __init__(self, experts: Llama4TextExperts) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.act_fn = experts.act_fn

    def forward(self, x_TD: Tensor, chosen_TK: Tensor, score_TK: Tensor) -> Tensor:
        """[T, D] sums over each token's experts, whose input is the token times their score."""
        y_TD = torch.zeros_like(x_TD)
        for expert, weights in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, index = torch.nonzero(chosen_TK == expert, as_tuple=True)
            if len(token):
                y_ND = self.run(x_TD[token] * score_TK[token, index, None], *weights)
                y_TD = y_TD.index_add(0, token, y_ND)
        return y_TD

    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """[N, D] one expert's results."""
        gate, up = (x_ND @ gate_up).chunk(2, dim=-1)
        y_ND: Tensor = (up * self.act_fn(gate)) @ down
        return y_ND


class ChosenExperts(nn.Module):
    """A shared expert for all tokens, and each token's best K others by the router.

    No capacity, so no token is dropped. An expert's input is the token times the sigmoid of its score.
    Differs: transformers runs every expert on every token, times zero where it is not chosen.
    """

    def __init__(self, experts: Llama4TextMoe) -> None:
        super().__init__()
        self.router, self.experts = experts.router, RoutedExperts(experts.experts)
        self.shared_expert = experts.shared_expert
        self.total = nn.Identity()  # of the experts: where ranks with parts of them sum
        self.top_k: int = experts.top_k

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K] each token's experts, and [T, K] the sigmoids of their scores."""
        score_TX = nn.functional.linear(x_TD, self.router.weight)
        best_TK, chosen_TK = score_TX.topk(self.top_k, dim=-1)
        wide_TK = best_TK.to(torch.promote_types(best_TK.dtype, torch.float32)).sigmoid()
        return chosen_TK, wide_TK.to(best_TK.dtype)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """([T, D], None) from [1, T, D]."""
        x_TD = hidden_states.flatten(0, 1)
        y_TD: Tensor = self.shared_expert(x_TD)
        return self.total(y_TD + self.experts(x_TD, *self.route(x_TD))), None


class Llama4Mixture(Mixture):
    """Experts whose inputs are tokens times scores, and one expert for all tokens."""

    def choose(self, x_SD: Tensor) -> Choice:
        expert_SK, score_SK = self.module.route(x_SD)
        return Choice(expert_SK, before=score_SK)

    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        y_ND: Tensor = self.module.experts.run(x_ND, gate_up, down)
        return y_ND

    @property
    def for_all(self) -> nn.Module | None:
        expert: nn.Module = self.module.get_submodule(SHARED_EXPERT)
        return expert

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        del like
        return y_TD, None


def adapt(layer: nn.Module) -> None:
    """Replace transformers' attention and experts in a layer by these, with the same names of weights."""
    replace_parts(layer, Llama4TextAttention, PackedAttention)
    replace_parts(layer, Llama4TextMoe, ChosenExperts)
