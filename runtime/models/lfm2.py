"""LFM2's gated short convolutions on packed items, and its mixture of experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv, Lfm2MoeSparseMoeBlock

from runtime.models.adapter import CutKind, CutRules
from runtime.models.attention import Packing
from runtime.models.mixture import Choice, Mixture
from runtime.models.norm import replace_parts
from runtime.models.separate_experts import SeparateExperts

# Shape suffixes: S, T = packed tokens, N = items of one length L, D = channels, X = experts, K = of a token.

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
_NO_DIVISION_BY_ZERO = 1e-6


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


class LfmRouter(nn.Module):
    """The router in the wider of float32 and the input's own type.

    A token chooses its K experts by their sigmoids plus a correction, which training leaves as it is; their
    shares are those without it.

    Differs: transformers computes scores in the model's type.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = router.weight
        self.top_k: int = router.top_k
        self.sums_to_one: bool = router.norm_topk_prob
        self.scale: float = router.routed_scaling_factor

    def forward(self, hidden_TD: Tensor, correction_X: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logits_TX = functional.linear(hidden_TD.to(wide), self.weight.to(wide))
        score_TX = logits_TX.sigmoid()
        choice_TX = score_TX.detach() if correction_X is None else score_TX.detach() + correction_X
        expert_TK = choice_TX.topk(self.top_k, dim=-1).indices
        share_TK = score_TX.gather(1, expert_TK)
        if self.sums_to_one:
            share_TK = share_TK / (share_TK.sum(dim=-1, keepdim=True) + _NO_DIVISION_BY_ZERO)
        return logits_TX, share_TK * self.scale, expert_TK


class LfmMixture(Mixture):
    """Experts whose results are multiplied by their shares."""

    def choose(self, x_SD: Tensor) -> Choice:
        correction_X = getattr(self.module, CORRECTION, None)
        _, share_SK, expert_SK = self.module.gate(x_SD, correction_X)
        return Choice(expert_SK, after=share_SK)


def adapt(layer: nn.Module) -> None:
    """Replace the short convolution in a layer, if any, with the same names of weights.

    Mixtures get their corrections on the CPU, where layers are built without memory.
    """
    for kind in (Lfm2ShortConv, Lfm2MoeShortConv):
        replace_parts(layer, kind, ShortConv)
    for module in layer.modules():
        if isinstance(module, Lfm2MoeSparseMoeBlock) and module.use_expert_bias:
            num = module.get_buffer(CORRECTION).shape[0]
            module.register_buffer(CORRECTION, torch.zeros(num, dtype=torch.float32, device="cpu"))
