"""Gated DeltaNet layers of Qwen3.5 and Qwen3-Next on packed items, and their gated shared expert."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse
from transformers.models.qwen3_next import modeling_qwen3_next as following

from runtime.models.adapter import CutKind, CutRules
from runtime.models.attention import LengthGroup, Packing
from runtime.models.initialise import Fill, constant
from runtime.models.mixture import SHARED_EXPERT, MixtralMixture
from runtime.models.wide_float import in_float64

# Shape suffixes: T = packed tokens, N = items of one length L, D = hidden width.

DELTA_NETS = (dense.Qwen3_5GatedDeltaNet, sparse.Qwen3_5MoeGatedDeltaNet, following.Qwen3NextGatedDeltaNet)
GATED_NORMS = (dense.Qwen3_5RMSNormGated, sparse.Qwen3_5MoeRMSNormGated, following.Qwen3NextRMSNormGated)
SHARED_GATE = "shared_expert_gate"  # submodule of a mixture
CUTS: CutRules = (
    *((kind, CutKind.HEADS) for kind in DELTA_NETS),
    *((kind, CutKind.PARTIAL) for kind in GATED_NORMS),
    (nn.Conv1d, CutKind.FUSED),
    (f"block.mlp.{SHARED_GATE}", CutKind.PARTIAL),
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


class ItemByItem:
    """Replaces the forward of a DeltaNet layer: its state and its convolution begin anew in every item.

    Items of one length run as one batch, up to the last product, which takes all tokens in their order:
    tensor-parallel ranks sum its results, and may keep a part of the tokens each. Differs: float64 stays
    float64, see `KeepsFloat64`.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net, self._forward = net, net.forward

    def __call__(self, hidden_states: Tensor, attention_mask: Any, **_: object) -> Tensor:
        """[1, T, D]; arguments have the names that transformers' layers give them."""
        if not isinstance(attention_mask, Packing):
            raise ValueError("linear attention runs over whole items on one rank, under no mask")
        packing, x_TD = attention_mask, hidden_states[0]
        product, self._net.out_proj = self._net.out_proj, nn.Identity()
        try:
            outputs = [self._run(x_TD, group) for group in packing.groups]
        finally:
            self._net.out_proj = product
        y_TD = outputs[0] if packing.restore is None else torch.cat(outputs).index_select(0, packing.restore)
        y_1TD: Tensor = self._net.get_submodule("out_proj")(y_TD[None])
        return y_1TD

    def _run(self, x_TD: Tensor, group: LengthGroup) -> Tensor:
        own_TD = x_TD if group.index is None else x_TD.index_select(0, group.index)
        x_NLD = own_TD.unflatten(0, (group.count, group.length))
        forward = in_float64(self._forward) if x_NLD.dtype is torch.float64 else self._forward
        return forward(x_NLD).flatten(0, 1)


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
