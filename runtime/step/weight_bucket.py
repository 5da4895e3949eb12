"""The trainable weights of one gradient group as one flat tensor, of which this rank updates a part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from runtime.parallel.tensor.group import SharedWeights
from runtime.step.fsdp.weights import places
from workbench.plan.lowered import Lowered, Weights
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.plan import Sharding
from workbench.plan.runnable import check_sharding

# Shape suffixes: N = elements of all weights and padding, S = elements of one part.


class HoldsWeights(Protocol):
    """A stage module, as far as gradients care."""

    def weights(self) -> Mapping[Weights, Sequence[nn.Parameter]]:
        """Every weight of the stage by gradient group, each group's in the same order on every rank."""

    @property
    def shared(self) -> SharedWeights | None:
        """What to do together with tensor-parallel ranks; None: this one has whole weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part of the weights of a group.

    Args:
        instance: ranks among which the weights are sharded, this one included.
        peers: ranks that update the same part, this one included.
        rank: this one.
    """

    instance: tuple[int, ...]
    peers: tuple[int, ...]
    rank: int

    @property
    def place(self) -> int:
        return self.instance.index(self.rank)

    @property
    def counts(self) -> bool:
        """Whether this rank's part counts in the norm: peers have the same."""
        return self.peers[0] == self.rank


class WeightBucket:
    """Weights that become views of one flat tensor, of which an optimizer updates one part.

    Where weights are narrower than what the optimizer works in, it updates a wide copy of the
    part, and gradients of microbatches are added up wide.

    Args:
        held: the weights, each with the copies of it on this rank; all trainable.
        share: which part this rank updates.
        wide: what the optimizer works in; None: the weights' own type.
    """

    def __init__(
        self, held: Sequence[Sequence[nn.Parameter]], share: Share, wide: torch.dtype | None = None
    ) -> None:
        self.share = share
        self._held = held
        first = held[0][0]
        num_parts = len(share.instance)
        self._size = -(-sum(copies[0].numel() for copies in held) // num_parts)
        self._weights_N = first.new_zeros(self._size * num_parts, requires_grad=False)
        for place_N, copies in zip(self._places(self._weights_N), held, strict=True):
            place_N.copy_(copies[0].detach().reshape(-1))
            copies[0].data = place_N.view_as(copies[0])
        self.is_wide = wide is not None and wide != first.dtype
        self.own = nn.Parameter(self._part(self._weights_N).to(wide or first.dtype))  # else a view
        self._sum_N: Tensor | None = None

    def accumulate(self) -> None:
        """Take the weights' gradients over into the bucket's own sum."""
        for copies in self._held:
            if any(copy.grad is not None for copy in copies) and self._sum_N is None:
                self._sum_N = torch.zeros_like(self._weights_N, dtype=self.own.dtype)
        if self._sum_N is None:
            return
        for place_N, copies in zip(self._places(self._sum_N), self._held, strict=True):
            for copy in copies:
                if copy.grad is not None:
                    place_N.view_as(copy).add_(copy.grad)
                    copy.grad = None

    def take(self) -> Tensor:
        """[N] the sum of all gradients since it was last taken; zeros where there were none."""
        self.accumulate()
        taken_N, self._sum_N = self._sum_N, None
        return torch.zeros_like(self._weights_N, dtype=self.own.dtype) if taken_N is None else taken_N

    def pieces(self, part_S: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(Weight, the piece of it that lies in this rank's part); padding is left out."""
        first, last = self.share.place * self._size, (self.share.place + 1) * self._size
        start = 0
        for copies in self._held:
            stop = start + copies[0].numel()
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield copies[0], part_S.narrow(0, low - first, high - low)
            start = stop

    def whole(self, flat_N: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(Every copy of a weight, what stands at its place)."""
        for place_N, copies in zip(self._places(flat_N), self._held, strict=True):
            for copy in copies:
                yield copy, place_N.view_as(copy)

    def empty_part(self) -> Tensor:
        """[S] for a part of a gradient."""
        return torch.empty_like(self.own, requires_grad=False)

    def updated(self) -> Tensor:
        """[S] this rank's part after the optimizer's step, as narrow as the weights."""
        own_S = self._part(self._weights_N)
        if self.is_wide:
            own_S.copy_(self.own.detach())
        return own_S

    @property
    def weights(self) -> Tensor:
        """[N] all weights: where the parts of others are collected."""
        return self._weights_N

    def renew_copies(self) -> None:
        """Other copies of a weight on this rank follow the first."""
        for copies in self._held:
            for copy in copies[1:]:
                copy.data.copy_(copies[0].data)

    def _part(self, flat_N: Tensor) -> Tensor:
        return flat_N.narrow(0, self.share.place * self._size, self._size)

    def _places(self, flat_N: Tensor) -> Iterator[Tensor]:
        return places(flat_N, (copies[0] for copies in self._held))


def weight_buckets(
    lowered: Lowered, rank: int, modules: Sequence[HoldsWeights], wide: torch.dtype | None = None
) -> dict[Weights, WeightBucket]:
    """Buckets of the weights that this rank updates in part, or wide; the rest are updated as they are.

    `ShardedStages` takes those of which it also holds a part only.

    Args:
        modules: stages of the rank, in the plan's order. Weights in buckets become views of them.
        wide: what optimizers work in; None: the weights' own type.

    Raises:
        ValueError: a level of sharding that cannot be executed.
    """
    held = copies_of(modules)
    found: dict[Weights, WeightBucket] = {}
    for group in lowered.groups:
        weights = group.weights[0]
        settings = lowered.plan.settings.of(weights.module)
        check_sharding(weights.module, settings)
        if settings.sharding is Sharding.PARAMETERS or rank not in group.ranks or weights not in held:
            continue
        shards = optimizer_shards(lowered.plan, group)
        if shards.num_shards == 1 and wide is None:
            continue
        share = Share(instance=shards.of(rank), peers=shards.peers(rank), rank=rank)
        found[weights] = WeightBucket(held[weights], share, wide)
    return found


def copies_of(modules: Iterable[HoldsWeights]) -> dict[Weights, list[list[nn.Parameter]]]:
    """Trainable weights of the stages by gradient group: of each weight all its copies, each once."""
    found: dict[Weights, list[list[nn.Parameter]]] = {}
    for module in modules:
        for weights, held in module.weights().items():
            trainable = [parameter for parameter in held if parameter.requires_grad]
            copies = found.setdefault(weights, [[] for _ in trainable])
            for known, parameter in zip(copies, trainable, strict=True):
                if all(parameter is not held for held in known):
                    known.append(parameter)
    return {weights: held for weights, held in found.items() if held}
