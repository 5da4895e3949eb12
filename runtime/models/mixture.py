"""Components of a layer with a mixture of experts, independent of its architecture's names."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Shape suffixes: S, T = tokens, X = experts, K = those of a token, N = rows of one expert, D = hidden width.

EXPERTS = "experts"  # submodule of a mixture with all experts' weights, expert by expert
SHARED_EXPERT, SHARED_EXPERTS = "shared_expert", "shared_experts"  # submodule of a mixture for all tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a router.

    Args:
        experts: [S, K] each token's experts.
        before: [S, K] factor of a token in each expert's input; None: 1.
        after: [S, K] factor of each expert's result; None: 1.
    """

    experts: Tensor
    before: Tensor | None = None
    after: Tensor | None = None


class Mixture(ABC):
    """A router and experts in a transformers module, which keeps its weights and their names."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @property
    def num_held(self) -> int:
        """Number of experts on this rank."""
        return len(self.module.experts.gate_up_proj)

    @abstractmethod
    def choose(self, x_SD: Tensor) -> Choice:
        """Choose every token's experts."""

    @abstractmethod
    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """[N, D] results of one expert."""

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """(gate and up, down) of every expert on this rank."""
        experts = self.module.experts
        return list(zip(experts.gate_up_proj.unbind(0), experts.down_proj.unbind(0), strict=True))

    @property
    def for_all(self) -> Callable[[Tensor], Tensor] | None:
        """The shared expert for all tokens; None where there is none."""
        return None

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        """The results in the form that the surrounding layer expects."""
        return y_TD.view_as(like)


class WideRouter(nn.Module):
    """Mixtral's and Qwen3's router in the wider of float32 and the input's own type.

    Only the K chosen experts of a token run; no capacity, so no token is dropped. Differs:
    transformers rounds float64 scores to float32, see `WideRMSNorm`, and Qwen3's shares to the input's
    type. The auxiliary balancing loss is not part of the loss.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight: Tensor = router.weight  # type: ignore[assignment]
        self.top_k: int = router.top_k  # type: ignore[assignment]
        self.sums_to_one: bool = getattr(router, "norm_topk_prob", True)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [T, X], shares [T, K], experts [T, K]; shares sum to 1 if the model normalises them."""
        logits_TX = functional.linear(hidden_TD.reshape(-1, self.weight.shape[1]), self.weight)
        wide_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32)).softmax(dim=-1)
        share_TK, expert_TK = wide_TX.topk(self.top_k, dim=-1)
        if self.sums_to_one:
            share_TK = share_TK / share_TK.sum(dim=-1, keepdim=True)
        return logits_TX, share_TK, expert_TK


class MixtralMixture(Mixture):
    """Mixtral's and Qwen3's mixture: results are multiplied by their shares."""

    def choose(self, x_SD: Tensor) -> Choice:
        _, share_SK, expert_SK = self.module.gate(x_SD)
        return Choice(expert_SK, after=share_SK)

    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = functional.linear(x_ND, gate_up).chunk(2, dim=-1)
        return functional.linear(self.module.experts.act_fn(gate) * up, down)


# Classes of modules with a router and experts -> the mixture that reads them.
MixtureKinds = tuple[tuple[type[nn.Module], type[Mixture]], ...]
