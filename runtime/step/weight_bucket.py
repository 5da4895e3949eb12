"""The trainable weights of one gradient group as one flat tensor, of which this rank updates a part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from runtime.parallel.tensor.group import SharedWeights
from runtime.step.flat_part import FlatPart
from runtime.step.fsdp.weights import split_flat
from workbench.plan.lowered import Lowered, Weights
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.plan import Sharding
from workbench.plan.runnable import check_sharding

# Shape suffixes: N = elements of all weights and padding, S = elements of one part.


class HoldsWeights(Protocol):
    """The interface of stage modules for gradients."""

    def weights(self) -> Mapping[Weights, Sequence[nn.Parameter]]:
        """Every weight of the stage by gradient group, each group's in the same order on every rank."""

    @property
    def shared(self) -> SharedWeights | None:
        """How tensor-parallel ranks share the weights; None: this one has whole weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part of the weights of a group.

    Args:
        instance: ranks among which the weights are sharded, including this one.
        peers: ranks that update the same part, including this one.
        rank: this one.
    """

    instance: tuple[int, ...]
    peers: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        return self.instance.index(self.rank)

    @property
    def counts(self) -> bool:
        """Whether this rank counts its part in the norm, as peers have the same part."""
        return self.peers[0] == self.rank


class WeightBucket:
    """Weights as views of one flat tensor, of which an optimizer updates one part.

    Where weights are narrower than the optimizer's type, it updates a wide copy of the part, and gradients of
    microbatches are accumulated in the wide type.

    Args:
        weights: each with its copies on this rank; all trainable.
        share: the part that this rank updates.
        wide: type of the optimizer's copy; None: the weights' own type.
    """

    def __init__(
        self, weights: Sequence[Sequence[nn.Parameter]], share: Share, wide: torch.dtype | None = None
    ) -> None:
        self.share = share
        self._held = weights
        first = weights[0][0]
        num_parts = len(share.instance)
        self._size = -(-sum(copies[0].numel() for copies in weights) // num_parts)
        self._weights_N = first.new_zeros(self._size * num_parts, requires_grad=False)
        for part_N, copies in zip(self._split(self._weights_N), weights, strict=True):
            part_N.copy_(copies[0].detach().reshape(-1))
            copies[0].data = part_N.view_as(copies[0])
        self.is_wide = wide is not None and wide != first.dtype
        self.own = nn.Parameter(self._part(self._weights_N).to(wide or first.dtype))  # otherwise a view
        self._sum_N: Tensor | None = None

    def accumulate(self) -> None:
        """Move the weights' gradients to the bucket's own sum."""
        for copies in self._held:
            if any(copy.grad is not None for copy in copies) and self._sum_N is None:
                self._sum_N = torch.zeros_like(self._weights_N, dtype=self.own.dtype)
        if self._sum_N is None:
            return
        for part_N, copies in zip(self._split(self._sum_N), self._held, strict=True):
            for copy in copies:
                if copy.grad is not None:
                    part_N.view_as(copy).add_(copy.grad)
                    copy.grad = None

    def take(self) -> Tensor:
        """[N] the sum of all gradients since the last call; zeros if there are none."""
        self.accumulate()
        taken_N, self._sum_N = self._sum_N, None
        return torch.zeros_like(self._weights_N, dtype=self.own.dtype) if taken_N is None else taken_N

    def pieces(self, part_S: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (weight, its piece in this rank's part), without padding."""
        first, last = self.share.index * self._size, (self.share.index + 1) * self._size
        start = 0
        for copies in self._held:
            stop = start + copies[0].numel()
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield copies[0], part_S.narrow(0, low - first, high - low)
            start = stop

    def whole(self, flat_N: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (every copy of a weight, its elements in a flat tensor)."""
        for part_N, copies in zip(self._split(flat_N), self._held, strict=True):
            for copy in copies:
                yield copy, part_N.view_as(copy)

    def flat_part(self) -> FlatPart:
        """The part that this rank updates."""
        held, share = tuple(copies[0] for copies in self._held), self.share
        return FlatPart(own=self.own, held=held, ranks=share.instance, member=share.index)

    def empty_part(self) -> Tensor:
        """[S] an empty tensor for a part of a gradient."""
        return torch.empty_like(self.own, requires_grad=False)

    def updated(self) -> Tensor:
        """[S] this rank's part after the optimizer's step, in the weights' type."""
        own_S = self._part(self._weights_N)
        if self.is_wide:
            own_S.copy_(self.own.detach())
        return own_S

    @property
    def weights(self) -> Tensor:
        """[N] all weights, into which other ranks' parts are gathered."""
        return self._weights_N

    def renew_copies(self) -> None:
        """Update further copies of a weight on this rank from the first."""
        for copies in self._held:
            for copy in copies[1:]:
                copy.data.copy_(copies[0].data)

    def _part(self, flat_N: Tensor) -> Tensor:
        return flat_N.narrow(0, self.share.index * self._size, self._size)

    def _split(self, flat_N: Tensor) -> Iterator[Tensor]:
        return split_flat(flat_N, (copies[0] for copies in self._held))


def weight_buckets(
    lowered: Lowered, rank: int, modules: Sequence[HoldsWeights], wide: torch.dtype | None = None
) -> dict[Weights, WeightBucket]:
    """Buckets of weights of which this rank updates a part, or a wide copy; others are updated directly.

    Weights that are themselves sharded are in `ShardedStages`.

    Args:
        modules: stages of the rank, in the plan's order. Weights in buckets become views of the buckets.
        wide: type of the optimizers' copies; None: the weights' own type.

    Raises:
        ValueError: a level of sharding that cannot be executed.
    """
    copies = copies_of(modules)
    buckets: dict[Weights, WeightBucket] = {}
    for group in lowered.groups:
        weights = group.weights[0]
        settings = lowered.plan.settings.of(weights.module)
        check_sharding(weights.module, settings)
        if settings.sharding is Sharding.PARAMETERS or rank not in group.ranks or weights not in copies:
            continue
        shards = optimizer_shards(lowered.plan, group)
        if shards.num_shards == 1 and wide is None:
            continue
        share = Share(instance=shards.of(rank), peers=shards.peers(rank), rank=rank)
        buckets[weights] = WeightBucket(copies[weights], share, wide)
    return buckets


def copies_of(modules: Iterable[HoldsWeights]) -> dict[Weights, list[list[nn.Parameter]]]:
    """Gradient group -> trainable weights of the stages, each with all its distinct copies."""
    by_group: dict[Weights, list[list[nn.Parameter]]] = {}
    for module in modules:
        for weights, parameters in module.weights().items():
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            copies = by_group.setdefault(weights, [[] for _ in trainable])
            for copies_of_weight, parameter in zip(copies, trainable, strict=True):
                if all(parameter is not parameters for parameters in copies_of_weight):
                    copies_of_weight.append(parameter)
    return {weights: parameters for weights, parameters in by_group.items() if parameters}
