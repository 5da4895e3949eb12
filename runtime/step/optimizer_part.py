"""Which weights of a rank its optimizer updates in part, or wider than they are: as the plan says."""

from collections.abc import Sequence

import torch

from runtime.step.gradients import HoldsWeights, copies_of
from runtime.step.weight_bucket import Share, WeightBucket
from workbench.plan.lowered import Lowered, Weights
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.plan import Sharding

EXECUTED = (Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS)


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
        sharding = lowered.plan.settings.of(weights.module).sharding
        if sharding not in EXECUTED:
            raise ValueError(
                f"module {weights.module!r}: sharding {sharding.value!r} cannot be executed; want one of "
                f"{', '.join(level.value for level in EXECUTED)} (simulate this plan instead)"
            )
        if sharding is Sharding.PARAMETERS or rank not in group.ranks or weights not in held:
            continue
        shards = optimizer_shards(lowered.plan, group)
        if shards.num_shards == 1 and wide is None:
            continue
        share = Share(instance=shards.of(rank), peers=shards.peers(rank), rank=rank)
        found[weights] = WeightBucket(held[weights], share, wide)
    return found
