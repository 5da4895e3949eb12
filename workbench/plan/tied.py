"""Weights that several stages of one rank hold as one tensor: tied ones, and those of equal stages."""

from typing import NamedTuple

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.plan import Plan, Sharding, Stage
from workbench.schedule.action import MOVES


class OneWeight(NamedTuple):
    """A tied weight on one rank: its module, its name, and the stages that use it, in the plan's order."""

    module: str
    name: str
    stages: tuple[int, ...]


def tied_on(plan: Plan, rank: int) -> tuple[OneWeight, ...]:
    """Every tied weight that at least two stages of the rank hold alike.

    Stages that leave the device or whose weights are sharded keep a tensor of their own.

    Complexity: O(layers of the rank's stages + actions of its program).
    """
    found: dict[tuple[str, int, tuple[int, ...], str], list[int]] = {}
    for stage in _staying(plan, rank):
        row = next(row for row in stage.ranks if rank in row)
        for name in _tied_names(plan, stage):
            found.setdefault((stage.module, stage.replica, row, name), []).append(stage.id)
    return tuple(OneWeight(key[0], key[3], tuple(users)) for key, users in found.items() if len(users) > 1)


def equal_stages(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Stages of replicas that have a rank to themselves and the same layers there, itself one of them.

    So a rank works for several replicas whose other stages have more ranks: it holds every weight once,
    and its gradients are added up once. Ascending.
    """
    if len(stage.flat_ranks) > 1:
        return (stage.id,)
    held = _staying(plan, stage.flat_ranks[0])
    mine = (stage.module, stage.layers, stage.ranks)
    return tuple(sorted({stage.id, *(s.id for s in held if (s.module, s.layers, s.ranks) == mine)}))


@cached_on_instance
def _staying(plan: Plan, rank: int) -> tuple[Stage, ...]:
    """Stages of a rank that stay on the device whole, where there are several."""
    stages = plan.stages_on.get(rank, ())
    if len(stages) < 2:
        return ()
    moved = {a.stage for a in plan.program.get(rank, ()) if a.kind in MOVES}
    return tuple(
        stage
        for stage in stages
        if stage.id not in moved and plan.settings.of(stage.module).sharding is not Sharding.PARAMETERS
    )


def _tied_names(plan: Plan, stage: Stage) -> tuple[str, ...]:
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    return tuple(dict.fromkeys(shared for layer in layers for _, shared in layer.tied))
