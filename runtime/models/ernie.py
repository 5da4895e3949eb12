"""Parts of an ERNIE 4.5 layer: attention that rotates pairs of neighbours, and a router with a correction."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5Attention, Ernie4_5RotaryEmbedding
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeAttention

from runtime.models.cohere import PairedAttention
from runtime.models.glm import CORRECTION
from runtime.models.mixture import wide_logits
from runtime.models.norm import replace_parts

# Shape suffixes: T = tokens, X = experts, K = experts of a token, D = hidden width or a head's.


class PairedRotary(Ernie4_5RotaryEmbedding):
    """Cosines and sines that stand twice each, side by side, once for all layers."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        halves = super().forward(x, position_ids)
        cos_1TD, sin_1TD = (each.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for each in halves)
        return cos_1TD, sin_1TD


class Statics(nn.Module):
    """What the choice of a router adds to shares; no weight, in float32."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer(CORRECTION, torch.zeros(1, num_experts, dtype=torch.float32, device="cpu"))


class ErnieRouter(nn.Module):
    """ERNIE's router in the wider of float32 and the input's own type.

    A token chooses its K experts by their shares of a softmax plus a correction; the shares without it are
    made to sum to 1. Training leaves the correction as it is.

    Differs: no losses that balance experts, as in transformers; transformers rounds float64 scores to
    float32, see `WideRMSNorm`.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = router.weight
        self.top_k: int = router.top_k
        self.least_sum: float = router.norm_min
        self.moe_statics = Statics(self.weight.shape[0])

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        logits_TX = wide_logits(hidden_TD, self.weight)
        share_TX = logits_TX.softmax(dim=-1)
        corrected_TX = share_TX.detach() + self.moe_statics.get_buffer(CORRECTION)
        expert_TK = corrected_TX.topk(self.top_k, dim=-1).indices
        share_TK = share_TX.gather(1, expert_TK)
        return logits_TX, share_TK / share_TK.sum(dim=-1, keepdim=True).clamp(min=self.least_sum), expert_TK


def adapt(layer: nn.Module) -> None:
    """Replace transformers' attention in a layer by ours, with the same names of weights."""
    for kind in (Ernie4_5Attention, Ernie4_5_MoeAttention):
        replace_parts(layer, kind, PairedAttention)
