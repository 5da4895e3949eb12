"""Weights that several stages of one rank hold as one tensor: tied ones, and those of equal stages."""

from typing import NamedTuple

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.parameter_shards import is_sharded
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import MOVES


class TiedWeight(NamedTuple):
    """A tied weight on one rank: its module, its name, and the stages that use it, in the plan's order."""

    module: str
    name: str
    stages: tuple[int, ...]


def tied_on(plan: Plan, rank: int) -> tuple[TiedWeight, ...]:
    """Return every tied weight that at least two stages of the rank hold as one tensor.

    Stages that are offloaded to the host, or whose weights are sharded, keep a tensor of their own.

    Complexity: O(layers of the rank's stages + actions of its program).
    """
    users_of: dict[tuple[str, int, tuple[int, ...], str], list[int]] = {}
    for stage in _resident(plan, rank):
        if not plan.model.module(stage.module).tied_layers:
            continue
        row = next(row for row in stage.ranks if rank in row)
        for name in _tied_names(plan, stage):
            users_of.setdefault((stage.module, stage.replica, row, name), []).append(stage.id)
    return tuple(
        TiedWeight(key[0], key[3], tuple(users)) for key, users in users_of.items() if len(users) > 1
    )


def equal_stages(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Return the stages on a rank of their own that hold the same layers there, the given one among them.

    So a rank works for several replicas whose other stages have more ranks: it holds every weight once, and
    its gradients are reduced once. Ascending.
    """
    if len(stage.flat_ranks) > 1:
        return (stage.id,)
    candidates = _resident(plan, stage.flat_ranks[0])
    shape = (stage.module, stage.layers, stage.ranks)
    return tuple(sorted({stage.id, *(s.id for s in candidates if (s.module, s.layers, s.ranks) == shape)}))


@cached_on_instance
def _resident(plan: Plan, rank: int) -> tuple[Stage, ...]:
    """Return the stages of a rank that stay on the device unsharded, if it has several stages."""
    stages = plan.stages_on.get(rank, ())
    if len(stages) < 2:
        return ()
    moved = {a.stage for a in plan.program.get(rank, ()) if a.kind in MOVES}
    return tuple(stage for stage in stages if stage.id not in moved and not is_sharded(plan, stage))


def _tied_names(plan: Plan, stage: Stage) -> tuple[str, ...]:
    module = plan.model.module(stage.module)
    layers = (module.layers[index] for index in module.tied_layers if index in range(*stage.layers))
    return tuple(dict.fromkeys(shared for layer in layers for _, shared in layer.tied))
