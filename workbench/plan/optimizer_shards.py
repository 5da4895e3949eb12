"""Which rank updates which part of weights that several ranks hold."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from workbench.plan.gradient_groups import group_on, trained_weights
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage


@dataclass(frozen=True, slots=True)
class OptimizerShards:
    """The ranks of a gradient group in instances, each of which holds the whole optimizer state once.

    Args:
        instances: ranks of each, consecutive in the group; the i-th rank of each holds shard i.
    """

    instances: tuple[tuple[int, ...], ...]

    @property
    def num_shards(self) -> int:
        """Number of shards of the state."""
        return len(self.instances[0])

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the instance of a rank, in which it gathers its updated weights."""
        return next(ranks for ranks in self.instances if rank in ranks)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same shard, this one included: they reduce its gradient."""
        index = self.of(rank).index(rank)
        return tuple(ranks[index] for ranks in self.instances)


def optimizer_shards(plan: Plan, group: GradientGroup) -> OptimizerShards:
    """Return how a gradient group's optimizer state is sharded; one instance per rank where it is whole.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (stage 1). Differs: several instances, as
    Megatron's distributed optimizer has them: less to gather and over shorter distances, for more memory.

    Raises:
        ValueError: a number of instances that does not divide the ranks.
    """
    settings = plan.settings.of(group.weights[0].module)
    num_ranks = len(group.ranks)
    if settings.sharding in (Sharding.NONE, Sharding.PARAMETERS):  # sharded parameters: a group is one shard
        return _instances(group.ranks, 1)
    if num_ranks % settings.instances:
        valid = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
        nearest = min(valid, key=lambda count: (abs(count - settings.instances), count))
        raise ValueError(
            f"module {settings.module!r}: optimizer instances must divide the {num_ranks} ranks that hold "
            f"the same weights, got {settings.instances}; nearest: {nearest}"
        )
    return _instances(group.ranks, num_ranks // settings.instances)


def state_shards(plan: Plan, stage: Stage) -> dict[Weights, int]:
    """Map trained weights of a stage to the number of shards of their optimizer state.

    Empty where the state is whole, or is sharded with the weights. Weights of one stage may have unlike
    groups: tied ones those of all stages that use them.

    Raises:
        ValueError: as `optimizer_shards`.

    Complexity: O(layers x tp or ep), but for the groups, which are derived once.
    """
    if plan.settings.of(stage.module).sharding not in (Sharding.OPTIMIZER, Sharding.GRADIENTS):
        return {}
    return _state_shards(plan, stage)


@cached_on_instance
def _state_shards(plan: Plan, stage: Stage) -> dict[Weights, int]:
    rank = stage.flat_ranks[0]
    num_shards: dict[int, int] = {}  # by identity of ranks: most groups of a stage share theirs
    shards: dict[Weights, int] = {}
    for weights in trained_weights(plan, stage):
        group = group_on(plan, weights, rank)
        if id(group.ranks) not in num_shards:
            num_shards[id(group.ranks)] = optimizer_shards(plan, group).num_shards
        shards[weights] = num_shards[id(group.ranks)]
    return shards


def check_instances(plan: Plan, groups: Iterable[GradientGroup]) -> None:
    """Raise ValueError as `optimizer_shards` for the first refused group; equal sizes are checked once."""
    first_of: dict[tuple[str, int], GradientGroup] = {}
    for group in groups:
        first_of.setdefault((group.weights[0].module, len(group.ranks)), group)
    for group in first_of.values():
        optimizer_shards(plan, group)


@lru_cache(maxsize=16_384)
def _instances(ranks: tuple[int, ...], size: int) -> OptimizerShards:
    return OptimizerShards(tuple(ranks[first : first + size] for first in range(0, len(ranks), size)))
