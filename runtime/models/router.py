"""Routing of tokens to experts that keeps float64 in float64."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# Shape suffixes: T = packed tokens, X = experts, K = experts per token, D = hidden width.


class WideRouter(nn.Module):
    """Mixtral's router in the wider of float32 and the input's own type.

    Only the K chosen experts of a token run; no capacity, so no token is dropped. Differs:
    transformers rounds float64 scores to float32, see `WideRMSNorm`. The auxiliary loss that
    balances experts is not part of the loss.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight: Tensor = router.weight  # type: ignore[assignment]
        self.top_k: int = router.top_k  # type: ignore[assignment]

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [T, X], shares [T, K] that sum to 1, experts [T, K]."""
        logits_TX = functional.linear(hidden_TD.reshape(-1, self.weight.shape[1]), self.weight)
        wide_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32)).softmax(dim=-1)
        share_TK, expert_TK = wide_TX.topk(self.top_k, dim=-1)
        return logits_TX, share_TK / share_TK.sum(dim=-1, keepdim=True), expert_TK


def widen_routers(layer: nn.Module, router_class: type[nn.Module]) -> None:
    """Replace every router of that class inside a layer, keeping the name of its weight."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, router_class):
                setattr(parent, name, WideRouter(child))
