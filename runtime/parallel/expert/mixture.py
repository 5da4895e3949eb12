"""What a layer with a mixture of experts is made of, whatever its architecture calls it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from runtime.models.adapter import StageLayer
from runtime.models.llama4 import SHARED_EXPERT, ChosenExperts

# Shape suffixes: S = tokens, K = experts of a token, N = rows of one expert, D = hidden width.

EXPERTS = "experts"  # the module inside a mixture that holds all experts' weights, expert by expert


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


class _Mixtral(Mixture):
    def choose(self, x_SD: Tensor) -> Choice:
        _, share_SK, expert_SK = self.module.gate(x_SD)
        return Choice(expert_SK, after=share_SK)

    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = functional.linear(x_ND, gate_up).chunk(2, dim=-1)
        return functional.linear(self.module.experts.act_fn(gate) * up, down)


class _Llama4(Mixture):
    def choose(self, x_SD: Tensor) -> Choice:
        expert_SK, score_SK = self.module.route(x_SD)
        return Choice(expert_SK, before=score_SK)

    def run(self, x_ND: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        y_ND: Tensor = self.module.experts.run(x_ND, gate_up, down)
        return y_ND

    @property
    def for_all(self) -> nn.Module | None:
        expert: nn.Module = self.module.get_submodule(SHARED_EXPERT)
        return expert

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        del like
        return y_TD, None


_KINDS: dict[type[nn.Module], type[Mixture]] = {MixtralSparseMoeBlock: _Mixtral, ChosenExperts: _Llama4}


def mixtures_of(layer: StageLayer) -> dict[str, Mixture]:
    """Local name of the module -> its mixture, for every one in the layer."""
    return {name: _KINDS[type(m)](m) for name, m in layer.named_modules() if type(m) in _KINDS}
