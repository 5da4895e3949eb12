"""Experts of MiniMax-M2 and LFM2: a router of sigmoids, and a correction of its choice beside it."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock

from runtime.models.glm import CORRECTION
from runtime.models.mixture import Choice, Mixture, wide_logits

# Shape suffixes: S, T = tokens, X = experts, K = experts of a token, D = hidden width.


class SigmoidRouter(nn.Module):
    """The router in the wider of float32 and the input's own type.

    A token chooses its K experts by their sigmoids plus a correction; their shares are those without it.
    Training leaves the correction as it is.

    Differs: no losses that balance experts, as in transformers; transformers computes scores in the model's
    type, and rounds float64 ones to float32, see `WideRMSNorm`.
    """

    no_division_by_zero: ClassVar[float] = 0.0  # added to sums of shares

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = router.weight
        self.top_k: int = router.top_k
        self.sums_to_one: bool = getattr(router, "norm_topk_prob", True)
        self.scale: float = getattr(router, "routed_scaling_factor", 1.0)

    def forward(self, hidden_TD: Tensor, correction_X: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        logits_TX = wide_logits(hidden_TD, self.weight)
        score_TX = logits_TX.sigmoid()
        choice_TX = score_TX.detach() if correction_X is None else score_TX.detach() + correction_X
        expert_TK = choice_TX.topk(self.top_k, dim=-1).indices
        share_TK = score_TX.gather(1, expert_TK)
        if self.sums_to_one:
            share_TK = share_TK / (share_TK.sum(dim=-1, keepdim=True) + self.no_division_by_zero)
        return logits_TX, share_TK * self.scale, expert_TK


class MiniMaxMixture(Mixture):
    """Experts whose results are multiplied by their shares; the module may have a correction."""

    correction: ClassVar[str] = CORRECTION

    def choose(self, x_SD: Tensor) -> Choice:
        _, share_SK, expert_SK = self.module.gate(x_SD, getattr(self.module, self.correction, None))
        return Choice(expert_SK, after=share_SK)


def with_corrections(layer: nn.Module, kind: type[nn.Module], name: str) -> None:
    """Give mixtures of this class their corrections on the CPU, where layers are built without memory."""
    for module in layer.modules():
        if isinstance(module, kind) and getattr(module, name, None) is not None:
            num = module.get_buffer(name).shape[0]
            module.register_buffer(name, torch.zeros(num, dtype=torch.float32, device="cpu"))


def adapt(layer: nn.Module) -> None:
    """Give mixtures their corrections."""
    with_corrections(layer, MiniMaxM2SparseMoeBlock, CORRECTION)
