"""Hunyuan's mixture of experts: a router that is a product, and an MLP for all tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.mixture import SHARED_MLP, MixtralMixture

# Shape suffixes: T = tokens, X = experts, K = experts of a token, D = hidden width.


class HunyuanRouter(nn.Module):
    """Hunyuan's router: shares of a token's experts sum to 1.

    In the wider of float32 and the input's own type. Differs: transformers rounds float64 scores to float32,
    see `WideRMSNorm`.
    """

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.wg: nn.Linear = gate.wg
        self.top_k: int = gate.top_k

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        logits_TX: Tensor = self.wg(hidden_TD.reshape(-1, self.wg.in_features))
        wide = torch.promote_types(logits_TX.dtype, torch.float32)
        share_TK, expert_TK = logits_TX.to(wide).softmax(dim=-1).topk(self.top_k, dim=-1)
        return logits_TX, share_TK / share_TK.sum(dim=-1, keepdim=True), expert_TK


class HunyuanMixture(MixtralMixture):
    """Experts whose results are multiplied by their shares, and an MLP for all tokens."""

    shared = SHARED_MLP
