"""Gemma 4's language models: layers whose experts run beside an MLP, with a router and norms of their own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma4 import modeling_gemma4 as gemma4

from runtime.models.adapter import CutKind, CutRules
from runtime.models.initialise import Fill, constant
from runtime.models.mixture import Choice, Experts, Mixture
from runtime.models.norm import replace_parts

# Shape suffixes: S, T = tokens, X = experts, K = those of a token, D = hidden width.

BESIDE = "beside"  # part of a layer with router and experts, which checkpoints have in the layer itself


class Gemma4Router(nn.Module):
    """The router in the wider of float32 and the input's own type.

    Source: `Gemma4TextRouter` of transformers, which rounds float64 scores to float32, see `WideRMSNorm`.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.norm, self.proj = router.norm, router.proj
        self.scale: nn.Parameter = router.scale
        self.per_expert_scale: nn.Parameter = router.per_expert_scale
        self.top_k: int = router.config.top_k_experts

    def forward(self, x_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [S, K] and the factors of their results [S, K]."""
        normal_SD = self.norm(x_SD) * self.scale * x_SD.shape[1] ** -0.5
        score_SX: Tensor = self.proj(normal_SD)
        wide = torch.promote_types(score_SX.dtype, torch.float32)
        share_SK, expert_SK = functional.softmax(score_SX, -1, dtype=wide).topk(self.top_k, dim=-1)
        share_SK = share_SK / share_SK.sum(dim=-1, keepdim=True)
        return expert_SK, share_SK * self.per_expert_scale[expert_SK]


class Routed(nn.Module):
    """The parts of a layer beside its MLP, up to the sum of each token's experts."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.router = Gemma4Router(layer.router)
        self.pre_feedforward_layernorm_2 = layer.pre_feedforward_layernorm_2
        self.experts = Experts(layer.experts)
        self.total = nn.Identity()  # where ranks with parts of experts sum


class Gemma4Mixture(Mixture):
    """The router reads the residual stream, the experts a norm of it."""

    def choose(self, x_SD: Tensor) -> Choice:
        expert_SK, share_SK = self.module.router(x_SD)
        return Choice(expert_SK, after=share_SK)

    def read(self, x_SD: Tensor) -> Tensor:
        normal_SD: Tensor = self.module.pre_feedforward_layernorm_2(x_SD)
        return normal_SD

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        del like
        return self.module.total(y_TD)[None]


class SparseLayer(nn.Module):
    """A layer of transformers with experts, put together anew around `Routed`."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        inside = ("router", "experts", "pre_feedforward_layernorm_2")
        for name, part in layer.named_children():
            if name not in inside:
                self.add_module(name, part)
        self.beside = Routed(layer)
        self.register_buffer("layer_scalar", layer.layer_scalar)

    def forward(self, hidden_states: Tensor, attention_mask: Any, position_embeddings: Any) -> Tensor:
        """[1, T, D]; arguments are named as in transformers' layers."""
        part: Any = self
        attended, _ = part.self_attn(
            hidden_states=part.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            shared_kv_states=None,
        )
        x = hidden_states + part.post_attention_layernorm(attended)
        dense = part.post_feedforward_layernorm_1(part.mlp(part.pre_feedforward_layernorm(x)))
        sparse = part.post_feedforward_layernorm_2(part.beside(x))
        y: Tensor = x + part.post_feedforward_layernorm(dense + sparse)
        return (y * part.layer_scalar).to(y.dtype)


CUTS: CutRules = (
    (Experts, CutKind.EXPERTS),
    (Gemma4Router, CutKind.PARTIAL),
    (f"block.{BESIDE}.router.proj", CutKind.PARTIAL),
    (f"block.{BESIDE}.pre_feedforward_layernorm_2", CutKind.PARTIAL),
)
FILLS: tuple[tuple[str, Fill], ...] = (
    (".router.scale", constant(1.0)),
    (".router.per_expert_scale", constant(1.0)),
)


def adapt(layer: nn.Module) -> None:
    """Replace a layer of transformers with experts, with other names of some weights; factors are ones."""
    replace_parts(
        layer,
        gemma4.Gemma4TextDecoderLayer,
        lambda block: SparseLayer(block) if block.enable_moe_block else block,
    )
    block: Any = layer.get_submodule("block")
    block.layer_scalar = torch.ones(1, device="cpu")
