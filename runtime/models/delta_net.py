"""Gated DeltaNet layers of Qwen3.5 and Qwen3-Next on packed items, and their gated shared expert."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse
from transformers.models.qwen3_next import modeling_qwen3_next as following

from runtime.models.adapter import CutKind, CutRules
from runtime.models.initialise import Fill, constant
from runtime.models.item_by_item import ItemByItem
from runtime.models.mixture import SHARED_EXPERT, MixtralMixture

# Shape suffixes: T = packed tokens, D = hidden width.

DELTA_NETS = (dense.Qwen3_5GatedDeltaNet, sparse.Qwen3_5MoeGatedDeltaNet, following.Qwen3NextGatedDeltaNet)
GATED_NORMS = (dense.Qwen3_5RMSNormGated, sparse.Qwen3_5MoeRMSNormGated, following.Qwen3NextRMSNormGated)
SHARED_GATE = "shared_expert_gate"  # submodule of a mixture
GATE_CUTS: CutRules = ((f"block.mlp.{SHARED_GATE}", CutKind.PARTIAL),)
CUTS: CutRules = (
    *((kind, CutKind.HEADS) for kind in DELTA_NETS),
    *((kind, CutKind.PARTIAL) for kind in GATED_NORMS),
    (nn.Conv1d, CutKind.FUSED),
    *GATE_CUTS,
)
LEAST_DECAY, MOST_DECAY = 0.01, 16.0


def _log_decays(shape: Any, generator: torch.Generator) -> Tensor:
    """Logarithms of uniform numbers, as transformers draws them."""
    return torch.empty(*shape).uniform_(LEAST_DECAY, MOST_DECAY, generator=generator).log()


FILLS: tuple[tuple[str, Fill], ...] = (
    ("linear_attn.A_log", _log_decays),
    ("linear_attn.dt_bias", constant(1.0)),
    ("linear_attn.norm.weight", constant(1.0)),
)


def adapt(layer: nn.Module) -> None:
    """Let the DeltaNet in a layer, if any, run item by item."""
    for module in layer.modules():
        if isinstance(module, DELTA_NETS):
            module.forward = ItemByItem(module)


class GatedMixture(MixtralMixture):
    """Qwen3's mixture with an expert for all tokens, times the sigmoid of a number of each token."""

    @property
    def for_all(self) -> Callable[[Tensor], Tensor]:
        return self._gated

    def _gated(self, x_TD: Tensor) -> Tensor:
        number_T1: Tensor = self.module.get_submodule(SHARED_GATE)(x_TD)
        y_TD: Tensor = self.module.get_submodule(SHARED_EXPERT)(x_TD)
        return number_T1.sigmoid() * y_TD
