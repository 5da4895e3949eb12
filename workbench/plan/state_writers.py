"""Which rank writes the weights that several ranks hold."""

from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage

Held = tuple[str, tuple[int, int], int, int, int]  # module, layers, part of a tensor, parts, place of experts


def state_writers(plan: Plan) -> dict[int, int]:
    """Return rank -> the first rank that holds the same parts of the same weights: itself, or one before it.

    Replicas, and ranks that share a sequence, hold equal weights.

    Complexity: O(ranks x stages of a rank).
    """
    first_of: dict[tuple[Held, ...], int] = {}
    return {
        rank: first_of.setdefault(tuple(_held(stage, rank) for stage in plan.stages_on[rank]), rank)
        for rank in plan.ranks
    }


def has_whole_optimizer(plan: Plan, rank: int) -> bool:
    """Whether a rank has the optimizer state of all weights that it holds, as nothing of it is sharded."""
    return all(plan.settings.of(stage.module).sharding is Sharding.NONE for stage in plan.stages_on[rank])


def _held(stage: Stage, rank: int) -> Held:
    part = stage.ranks[stage.share_of(rank)].index(rank)
    experts = next((group.index(rank) for group in stage.expert_ranks if rank in group), 0)
    return stage.module, stage.layers, part, stage.tp, experts if stage.ep > 1 else 0
