"""What a layer with a mixture of experts is made of, whatever its architecture calls it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Shape suffixes: S, T = tokens, X = experts, K = those of a token, N = rows of one expert, D = hidden width.

EXPERTS = "experts"  # the module inside a mixture that holds all experts' weights, expert by expert
SHARED_EXPERT = "shared_expert"  # the module inside one that all tokens go through


@dataclass(frozen=True, slots=True)
class Choice:
    """What a router says.

    Args:
        experts: [S, K] each token's.
        before: [S, K] what a token is multiplied with on its way to each of them; None: 1.
        after: [S, K] what their results are multiplied with; None: 1.
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
        """Experts whose weights are here."""
        return len(self.module.experts.gate_up_proj)

    @abstractmethod
    def choose(self, x_SD: Tensor) -> Choice:
        """Of every token its experts."""

    @abstractmethod
    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """[N, D] one expert's results."""

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """(gate and up, down) of every expert here."""
        held = self.module.experts
        return list(zip(held.gate_up_proj.unbind(0), held.down_proj.unbind(0), strict=True))

    @property
    def for_all(self) -> nn.Module | None:
        """The expert that every token goes through besides; None where there is none."""
        return None

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        """The results as the layer around expects them."""
        return y_TD.view_as(like)


class WideRouter(nn.Module):
    """Mixtral's and Qwen3's router in the wider of float32 and the input's own type.

    Only the K chosen experts of a token run; no capacity, so no token is dropped. Differs:
    transformers rounds float64 scores to float32, see `WideRMSNorm`, and Qwen3's shares to the input's
    type. The auxiliary loss that balances experts is not part of the loss.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight: Tensor = router.weight  # type: ignore[assignment]
        self.top_k: int = router.top_k  # type: ignore[assignment]
        self.sums_to_one: bool = getattr(router, "norm_topk_prob", True)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [T, X], shares [T, K], experts [T, K]; shares sum to 1 where the model says so."""
        logits_TX = functional.linear(hidden_TD.reshape(-1, self.weight.shape[1]), self.weight)
        wide_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32)).softmax(dim=-1)
        share_TK, expert_TK = wide_TX.topk(self.top_k, dim=-1)
        if self.sums_to_one:
            share_TK = share_TK / share_TK.sum(dim=-1, keepdim=True)
        return logits_TX, share_TK, expert_TK


class MixtralMixture(Mixture):
    """Mixtral's and Qwen3's: results are multiplied by their shares."""

    def choose(self, x_SD: Tensor) -> Choice:
        _, share_SK, expert_SK = self.module.gate(x_SD)
        return Choice(expert_SK, after=share_SK)

    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = functional.linear(x_ND, gate_up).chunk(2, dim=-1)
        return functional.linear(self.module.experts.act_fn(gate) * up, down)


# Classes of modules that hold a router and experts, and what these are made of.
MixtureKinds = tuple[tuple[type[nn.Module], type[Mixture]], ...]
