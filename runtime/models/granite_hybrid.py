"""Granite 4: Mamba-2 mixers on packed items, and experts beside an MLP for all tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

from runtime.models import mamba
from runtime.models.adapter import CutKind, CutRules
from runtime.models.glm import GlmMixture
from runtime.models.initialise import Fill, constant
from runtime.models.mixture import EXPERTS, SHARED_EXPERTS, Experts, WideRouter

# Shape suffixes: S, T = tokens, X = experts, K = those of a token, D = hidden width.

MIXTURE, MLP = "block_sparse_moe", "shared_mlp"  # parts of a block in checkpoints; here MLP is both
MOVED = (
    (f"block.{MLP}.{SHARED_EXPERTS}.", f"block.{MLP}."),
    *((f"block.{MLP}.{part}.", f"block.{MIXTURE}.{part}.") for part in (EXPERTS, "router")),
)
REGIONS = ("mamba", MLP)


class ChosenRouter(WideRouter):
    """Granite's router: shares are a softmax over the scores of a token's experts alone."""

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TX = functional.linear(hidden_TD.reshape(-1, self.weight.shape[1]), self.weight)
        wide_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32))
        score_TK, expert_TK = wide_TX.topk(self.top_k, dim=-1)
        return logits_TX, score_TK.softmax(dim=-1), expert_TK


CUTS: CutRules = (
    *mamba.cuts("mamba", modeling.GraniteMoeHybridMambaLayer, modeling.GraniteMoeHybridRMSNormGated),
    (Experts, CutKind.EXPERTS),
    (ChosenRouter, CutKind.PARTIAL),
    *(
        (f"block.{part}.{product}", kind)
        for part in (MLP, f"{MLP}.{SHARED_EXPERTS}")
        for product, kind in (("input_linear", CutKind.FUSED), ("output_linear", CutKind.ROW))
    ),
)
FILLS: tuple[tuple[str, Fill], ...] = (("mamba.dt_bias", constant(1.0)), *mamba.fills("mamba"))
RESPELLED = (
    (f"{MIXTURE}.experts.gate_up_proj", f"{MIXTURE}.input_linear.weight"),
    (f"{MIXTURE}.experts.down_proj", f"{MIXTURE}.output_linear.weight"),
    (f"{MIXTURE}.router.weight", f"{MIXTURE}.router.layer.weight"),
)


class GraniteMixture(GlmMixture):
    """Experts whose results are multiplied by their shares, and an MLP for all tokens."""

    router = "router"


def adapt(layer: Any) -> None:
    """Let a layer's mixer run item by item; experts and the MLP beside them become one mixture."""
    mamba.run_by_items(layer, modeling.GraniteMoeHybridMambaLayer)
    block = layer.block
    if block.has_experts:
        mixture = block.block_sparse_moe
        mixture.shared_experts = block.shared_mlp
        block.shared_mlp, block.block_sparse_moe, block.has_experts = mixture, None, False
