"""LFM2's gated short convolutions on packed items, and its mixture of experts."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv, Lfm2MoeSparseMoeBlock

from runtime.models.adapter import CutKind, CutRules
from runtime.models.attention import Packing
from runtime.models.minimax import MiniMaxMixture, SigmoidRouter, with_corrections
from runtime.models.norm import replace_parts
from runtime.models.separate_experts import SeparateExperts

# Shape suffixes: S, T = packed tokens, N = items of one length L, D = channels.

CUTS: CutRules = (
    ("block.conv.in_proj", CutKind.FUSED),
    ("block.conv.conv", CutKind.COLUMN),
    ("block.feed_forward.w1", CutKind.COLUMN),
    ("block.feed_forward.w3", CutKind.COLUMN),
    ("block.feed_forward.w2", CutKind.ROW),
)
REGIONS = ("conv",)
_FEED_FORWARD = "feed_forward"
SEPARATE = SeparateExperts(own=_FEED_FORWARD, mixture=_FEED_FORWARD, gate="w1", up="w3", down="w2")
CORRECTION = "expert_bias"


class ShortConv(nn.Module):
    """The convolution of a product of two thirds of the input's channels, times the last third.

    It begins anew in every item; items of one length run as one batch.
    """

    def __init__(self, conv: Lfm2ShortConv) -> None:
        super().__init__()
        self.conv, self.in_proj, self.out_proj = conv.conv, conv.in_proj, conv.out_proj
        self.reach: int = conv.conv_kernel_size - 1  # earlier tokens that a token reads

    def forward(self, hidden_states: Tensor, attention_mask: Any, **_: object) -> Tensor:
        """[1, T, D]; arguments have the names that transformers' layers give them."""
        if not isinstance(attention_mask, Packing):
            raise ValueError("a short convolution runs over whole items on one rank, under no mask")
        first_TD, last_TD, x_TD = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        y_TD = last_TD * self._convolved(first_TD * x_TD, attention_mask)
        y_1TD: Tensor = self.out_proj(y_TD[None])
        return y_1TD

    def _convolved(self, x_TD: Tensor, packing: Packing) -> Tensor:
        outputs = []
        for group in packing.groups:
            own_TD = x_TD if group.index is None else x_TD.index_select(0, group.index)
            x_NDL = own_TD.unflatten(0, (group.count, group.length)).transpose(1, 2)
            y_NDL = functional.conv1d(
                x_NDL, self.conv.weight, self.conv.bias, padding=self.reach, groups=x_NDL.shape[1]
            )
            outputs.append(y_NDL[..., : group.length].transpose(1, 2).flatten(0, 1))
        if packing.restore is None:
            return outputs[0]
        return torch.cat(outputs).index_select(0, packing.restore)


class LfmRouter(SigmoidRouter):
    """LFM2's router."""

    no_division_by_zero: ClassVar[float] = 1e-6


class LfmMixture(MiniMaxMixture):
    """As MiniMax-M2's, under another name of the correction."""

    correction: ClassVar[str] = CORRECTION


def adapt(layer: nn.Module) -> None:
    """Replace the short convolution in a layer, if any, with the same names of weights; add corrections."""
    for kind in (Lfm2ShortConv, Lfm2MoeShortConv):
        replace_parts(layer, kind, ShortConv)
    with_corrections(layer, Lfm2MoeSparseMoeBlock, CORRECTION)
