"""Components of a layer with a mixture of experts, independent of its architecture's names.

A mixture sorts its tokens by expert, so that each expert has consecutive rows, runs all experts on them, and
sums the results of each token. Experts on other ranks differ by their dispatch alone. There is no capacity:
no token is dropped, and an expert without tokens has no rows.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2 (sums over each token's experts).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.models.expert_tally import ExpertTally
from runtime.models.grouped import GroupedLinear, Groups, Orientation, grouped
from runtime.models.sorted_rows import order_by

# Shape suffixes: S, T = tokens, X = experts, K = those of a token, R = rows, one per token and expert of it,
# D = hidden width.

EXPERTS = "experts"  # submodule of a mixture with all experts' weights
# Submodules of a mixture for all tokens.
SHARED_EXPERT, SHARED_EXPERTS, SHARED_MLP = "shared_expert", "shared_experts", "shared_mlp"


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


class Experts(nn.Module):
    """All experts of a mixture on this rank, with the names of weights of transformers' module.

    Args:
        experts: transformers' module.
        orientation: of its weights.

    Attributes:
        entering_name: of the weights that read the rows.
        linear: computes a grouped linear map; a split backward replaces it.
        alternates: whether features of gate and up alternate, instead of being halves.
        adds_bias: whether this rank adds the bias of results; of ranks that share an expert, one does.
        tally: counts the rows that routers send to all experts, by this rank's tokens.
    """

    entering_name: ClassVar[str] = "gate_up_proj"
    alternates: ClassVar[bool] = False

    def __init__(self, experts: Any, orientation: Orientation = Orientation.OUT_IN) -> None:
        super().__init__()
        self.register_parameter(self.entering_name, getattr(experts, self.entering_name))
        self.down_proj: nn.Parameter = experts.down_proj
        self.act_fn: Callable[[Tensor], Tensor] = getattr(experts, "act_fn", nn.Identity())
        self.orientation = orientation
        self.linear: Callable[[Tensor, GroupedLinear], Tensor] = grouped
        self.adds_bias = True
        self.tally = ExpertTally()

    @property
    def inner_dims(self) -> tuple[int, int]:
        """Dim of an expert's inner features, in the weights of gate and up, and of down."""
        return (1, 2) if self.orientation is Orientation.OUT_IN else (2, 1)

    @property
    def entering(self) -> nn.Parameter:
        """The weights that read the rows."""
        return self.get_parameter(self.entering_name)

    def forward(self, x_RD: Tensor, groups: Groups) -> Tensor:
        """[R, D] results of rows that are sorted by expert."""
        return self._mapped(self.gated(self._mapped(x_RD, self.entering, groups)), self.down_proj, groups)

    def gated(self, halves: Tensor) -> Tensor:
        """The activation of gate and up."""
        gate, up = halves.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _mapped(self, x: Tensor, weight: nn.Parameter, groups: Groups) -> Tensor:
        return self.linear(x, GroupedLinear(weight, self.orientation, groups))


class PlainExperts(Experts):
    """Experts whose MLPs have no gate."""

    entering_name: ClassVar[str] = "up_proj"

    def gated(self, halves: Tensor) -> Tensor:
        return self.act_fn(halves)


class Mixture(ABC):
    """A router and experts in a transformers module, which keeps its weights and their names."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @property
    def experts(self) -> Experts:
        """Those on this rank."""
        experts: Experts = self.module.experts
        return experts

    @property
    def num_held(self) -> int:
        """Number of experts on this rank."""
        return len(self.experts.entering)

    @abstractmethod
    def choose(self, x_SD: Tensor) -> Choice:
        """Choose every token's experts."""

    def read(self, x_SD: Tensor) -> Tensor:
        """What experts read of the tokens."""
        return x_SD

    def written(self, y_SD: Tensor) -> Tensor:
        """What becomes of the sums over each token's experts."""
        return y_SD

    @property
    def for_all(self) -> Callable[[Tensor], Tensor] | None:
        """The shared expert for all tokens; None where there is none."""
        return None

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        """The results in the form that the surrounding layer expects."""
        return y_TD.view_as(like)


class Dispatch(Protocol):
    """Brings rows to their experts and results back."""

    @property
    def num_ranks(self) -> int:
        """Ranks over which experts are distributed."""
        ...

    def destination(self, expert_R: Tensor, num_held: int) -> Tensor:
        """[R] numbers by which rows are sorted, from the indices of their experts."""
        ...

    def run(self, x_RD: Tensor, destination_R: Tensor, mixture: Mixture) -> Tensor:
        """[R, D] results of rows, sorted by destination, in the same order."""
        ...


class LocalDispatch:
    """All experts are on this rank."""

    num_ranks: ClassVar[int] = 1

    def destination(self, expert_R: Tensor, num_held: int) -> Tensor:
        del num_held
        return expert_R

    def run(self, x_RD: Tensor, destination_R: Tensor, mixture: Mixture) -> Tensor:
        index_X = torch.arange(mixture.num_held, device=destination_R.device)
        ends_X = torch.searchsorted(destination_R, index_X, right=True, out_int32=True)
        results_RD: Tensor = mixture.experts(x_RD, Groups(ends_X))
        return results_RD


def routed(x_SD: Tensor, mixture: Mixture, dispatch: Dispatch) -> Tensor:
    """[S, D] sums over each token's experts.

    Raises:
        RankError: see the dispatch.
    """
    choice = mixture.choose(x_SD)
    mixture.experts.tally.add(choice.experts, dispatch.num_ranks * mixture.num_held)
    destination_R = dispatch.destination(choice.experts.reshape(-1), mixture.num_held)
    rows = order_by(destination_R, choice.experts.shape[1])

    def entering() -> Tensor:
        x_RD = rows.sort(mixture.read(x_SD))
        return x_RD if choice.before is None else x_RD * choice.before.reshape(-1)[rows.order, None]

    # Nested calls, so that no name keeps rows alive that are done with.
    y_RD = rows.restore(dispatch.run(entering(), destination_R[rows.order], mixture))
    y_SKD = y_RD.view(*choice.experts.shape, y_RD.shape[1])
    if choice.after is not None:
        y_SKD = y_SKD * choice.after[..., None]
    return mixture.written(y_SKD.sum(1).to(x_SD.dtype))


@dataclass(frozen=True, slots=True)
class MixtureForward:
    """The forward of a mixture's module, with all of its experts on this rank."""

    mixture: Mixture

    def __call__(self, hidden_states: Tensor) -> Any:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        y_TD, for_all_TD = self._chosen(x_TD), self._for_all(x_TD)
        return self.mixture.returned(y_TD if for_all_TD is None else for_all_TD + y_TD, hidden_states)

    def _chosen(self, x_TD: Tensor) -> Tensor:
        """[T, D] sums over each token's experts."""
        return routed(x_TD, self.mixture, LocalDispatch())

    def _for_all(self, x_TD: Tensor) -> Tensor | None:
        """[T, D] of the shared expert."""
        expert = self.mixture.for_all
        return None if expert is None else expert(x_TD)


def wide_logits(hidden_TD: Tensor, weight_XD: Tensor) -> Tensor:
    """[T, X] scores of a router in the wider of float32 and the input's own type."""
    flat_TD = hidden_TD.reshape(-1, weight_XD.shape[1])
    wide = torch.promote_types(flat_TD.dtype, torch.float32)
    return functional.linear(flat_TD.to(wide), weight_XD.to(wide))


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
    """Results are multiplied by their shares, as Mixtral's are; subclasses name an MLP for all tokens.

    Its module has the router and that MLP under these names; an MLP of None is none.
    """

    router: ClassVar[str] = "gate"
    shared: ClassVar[str | None] = None

    def choose(self, x_SD: Tensor) -> Choice:
        _, share_SK, expert_SK = getattr(self.module, self.router)(x_SD)
        return Choice(expert_SK, after=share_SK)

    @property
    def for_all(self) -> Callable[[Tensor], Tensor] | None:
        mlp: nn.Module | None = None if self.shared is None else getattr(self.module, self.shared)
        return mlp


# Classes of modules with a router and experts -> the mixture that reads them.
MixtureKinds = tuple[tuple[type[nn.Module], type[Mixture]], ...]
