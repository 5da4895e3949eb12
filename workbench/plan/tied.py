"""Weights that several stages of one rank use, and hold as one tensor."""

from typing import NamedTuple

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
    stages = plan.stages_on.get(rank, ())
    if len(stages) < 2:
        return ()
    moved = {a.stage for a in plan.program.get(rank, ()) if a.kind in MOVES}
    for stage in stages:
        if stage.id in moved or plan.settings.of(stage.module).sharding is Sharding.PARAMETERS:
            continue
        row = next(row for row in stage.ranks if rank in row)
        for name in _tied_names(plan, stage):
            found.setdefault((stage.module, stage.replica, row, name), []).append(stage.id)
    return tuple(OneWeight(key[0], key[3], tuple(users)) for key, users in found.items() if len(users) > 1)


def _tied_names(plan: Plan, stage: Stage) -> tuple[str, ...]:
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    return tuple(dict.fromkeys(shared for layer in layers for _, shared in layer.tied))
