"""MiniMax-M2's mixture of experts: a router of sigmoids, and a correction of its choice beside it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock

from runtime.models.glm import CORRECTION
from runtime.models.mixture import Choice, Mixture

# Shape suffixes: S, T = tokens, X = experts, K = experts of a token, D = hidden width.


class SigmoidRouter(nn.Module):
    """MiniMax-M2's router in the wider of float32 and the input's own type.

    A token chooses its K experts by their sigmoids plus a correction; those without it are made to sum to 1.
    Training leaves the correction as it is.

    Differs: no losses that balance experts, as in transformers; transformers computes scores in the model's
    type, and rounds float64 ones to float32, see `WideRMSNorm`.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = router.weight
        self.top_k: int = router.top_k

    def forward(self, hidden_TD: Tensor, correction_X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        flat_TD = hidden_TD.reshape(-1, self.weight.shape[1])
        wide = torch.promote_types(flat_TD.dtype, torch.float32)
        logits_TX = functional.linear(flat_TD.to(wide), self.weight.to(wide))
        score_TX = logits_TX.sigmoid()
        expert_TK = (score_TX.detach() + correction_X).topk(self.top_k, dim=-1).indices
        share_TK = score_TX.gather(1, expert_TK)
        return logits_TX, share_TK / share_TK.sum(dim=-1, keepdim=True), expert_TK


class MiniMaxMixture(Mixture):
    """Experts whose results are multiplied by their shares."""

    def choose(self, x_SD: Tensor) -> Choice:
        _, share_SK, expert_SK = self.module.gate(x_SD, self.module.get_buffer(CORRECTION))
        return Choice(expert_SK, after=share_SK)


def adapt(layer: nn.Module) -> None:
    """Give mixtures their corrections on the CPU, where layers are built without memory."""
    for module in layer.modules():
        if isinstance(module, MiniMaxM2SparseMoeBlock):
            num = module.get_buffer(CORRECTION).shape[0]
            module.register_buffer(CORRECTION, torch.zeros(num, dtype=torch.float32, device="cpu"))
