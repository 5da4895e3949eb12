"""Weights that are gathered at once, and the ranks among which they are sharded."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

RankGroups = tuple[tuple[int, ...], ...]


class FlatWeights(NamedTuple):
    """Weights of a stage that are one tensor while they are whole.

    Args:
        num_elements: on one rank, without padding.
        experts: whether they are experts that ranks distribute.
    """

    num_elements: int
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardUnit:
    """What is gathered at once: stages of all replicas of an instance that hold the same layers.

    No `slots`: what follows from its weights is cached on the instance.

    Args:
        stages: one per replica.
        holders: groups of ranks that hold the same weights, each rank one shard of every weight; ascending.
            Together, all ranks of the stages.
        expert_holders: likewise for the experts of each expert-parallel index; empty: experts are not
            distributed. Experts with one holder stay whole there.
        trained: tensors whose gradient is reduced in rounds: the stage's own trained weights, then each tied
            one, then distributed experts.
        frozen: likewise for frozen weights.
    """

    stages: tuple[int, ...]
    holders: RankGroups
    expert_holders: RankGroups = ()
    trained: tuple[FlatWeights, ...]
    frozen: tuple[FlatWeights, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return self.holders[0] if len(self.holders) == 1 else tuple(sorted(chain(*self.holders)))

    @cached_property
    def gathered(self) -> tuple[FlatWeights, ...]:
        """What a round gathers."""
        return self._sharded((*self.trained, *self.frozen))

    @cached_property
    def scattered(self) -> tuple[FlatWeights, ...]:
        """What has its gradients reduce-scattered in a round."""
        return self._sharded(self.trained)

    def _sharded(self, tensors: Iterable[FlatWeights]) -> tuple[FlatWeights, ...]:
        return tuple(flat for flat in tensors if self.num_shards(experts=flat.experts) > 1)

    def groups(self, *, experts: bool) -> RankGroups:
        """Groups of ranks that shard the same weights: distributed experts, or all others."""
        return self.expert_holders if experts else self.holders

    def sharers(self, rank: int, *, experts: bool) -> tuple[int, ...]:
        """The ranks with which a rank of the unit shards its weights, itself among them."""
        return next(ranks for ranks in self.groups(experts=experts) if rank in ranks)

    def num_shards(self, *, experts: bool) -> int:
        """Number of shards of each weight."""
        return len(self.groups(experts=experts)[0])

    def part(self, flat: FlatWeights) -> int:
        """Return how many elements of such a tensor one rank keeps, padding included."""
        return -(-flat.num_elements // self.num_shards(experts=flat.experts))

    def padded(self, flat: FlatWeights) -> int:
        """Return the elements of such a tensor while it is whole, padding included."""
        return self.part(flat) * self.num_shards(experts=flat.experts)
