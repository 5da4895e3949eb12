"""Which rank updates which part of the weights that several ranks hold."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from workbench.plan.gradient_groups import group_on, trained_weights
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.plan import Plan, Sharding, Stage


@dataclass(frozen=True, slots=True)
class OptimizerShards:
    """The ranks of a gradient group as instances, each of which holds the whole optimizer state once.

    Args:
        instances: ranks of each, neighbours in the group: the i-th rank of each holds part i.
    """

    instances: tuple[tuple[int, ...], ...]

    @property
    def num_shards(self) -> int:
        """Parts of the weights."""
        return len(self.instances[0])

    def of(self, rank: int) -> tuple[int, ...]:
        """The instance that a rank is in: it collects its updated weights there."""
        return next(ranks for ranks in self.instances if rank in ranks)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part, this one included: they add up their parts of the gradient."""
        index = self.of(rank).index(rank)
        return tuple(ranks[index] for ranks in self.instances)


def optimizer_shards(plan: Plan, group: GradientGroup) -> OptimizerShards:
    """How the optimizer state of a gradient group is sharded; one instance a rank where it is whole.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (stage 1). Differs: several instances, as
    Megatron's distributed optimizer has them: less to gather and over shorter ways, for more memory.

    Raises:
        ValueError: a number of instances that does not divide the ranks.
    """
    settings = plan.settings.of(group.weights[0].module)
    num_ranks = len(group.ranks)
    if settings.sharding in (Sharding.NONE, Sharding.PARAMETERS):  # a group of the latter has one part
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
    """Trained weights of a stage -> parts into which the optimizer's state of them is cut on its ranks.

    None where the state is whole, or goes with sharded weights. Weights of one stage may have unlike groups:
    tied ones those of all stages that use them.

    Raises:
        ValueError: as `optimizer_shards`.

    Complexity: O(layers x tp or ep), but for the groups, which are derived once.
    """
    if plan.settings.of(stage.module).sharding not in (Sharding.OPTIMIZER, Sharding.GRADIENTS):
        return {}
    rank = stage.flat_ranks[0]
    return {
        weights: optimizer_shards(plan, group_on(plan, weights, rank)).num_shards
        for weights in trained_weights(plan, stage)
    }


def check_instances(plan: Plan, groups: Iterable[GradientGroup]) -> None:
    """Raise ValueError as `optimizer_shards` of the first group that is refused: by its module and size."""
    first_of: dict[tuple[str, int], GradientGroup] = {}
    for group in groups:
        first_of.setdefault((group.weights[0].module, len(group.ranks)), group)
    for group in first_of.values():
        optimizer_shards(plan, group)


@lru_cache(maxsize=16_384)
def _instances(ranks: tuple[int, ...], size: int) -> OptimizerShards:
    return OptimizerShards(tuple(ranks[first : first + size] for first in range(0, len(ranks), size)))
