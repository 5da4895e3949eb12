"""Bytes of one stage's weights on one rank: parameters, gradients and optimizer state."""

from collections.abc import Collection, Iterator
from math import ceil
from typing import NamedTuple

from workbench.memory.layer import state_bytes
from workbench.model.experts import is_of_expert
from workbench.model.layer import Layer
from workbench.plan.expert_groups import has_expert_parallelism, held_elements
from workbench.plan.gradient_groups import num_replicas
from workbench.plan.plan import Plan, Sharding, Stage
from workbench.plan.tied import equal_stages, tied_on


class StateKind(NamedTuple):
    """Which part of a parameter's state, of which module; printed `optimizer of llm`."""

    part: str
    module: str

    def __str__(self) -> str:
        return f"{self.part} of {self.module}"


GRADIENTS = "gradients"

# What each level of sharding cuts (Rajbhandari et al. 2020, "ZeRO": stages 1, 2 and 3).
_SHARDED = {
    "parameters": (Sharding.PARAMETERS,),
    GRADIENTS: (Sharding.GRADIENTS, Sharding.PARAMETERS),
    "optimizer": (Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS),
}


def state_of(plan: Plan, rank: int) -> Iterator[tuple[Stage, StateKind, int]]:
    """(stage, part, bytes) of every parameter on a rank; what stages share counts once, with the first.

    Complexity: O(parameters of the rank's stages).
    """
    held_by = {(stage, one.name): one.stages[0] for one in tied_on(plan, rank) for stage in one.stages}
    for stage in plan.stages_on.get(rank, ()):
        if equal_stages(plan, stage)[0] != stage.id:
            continue
        seen = {name for (user, name), first in held_by.items() if user == stage.id != first}
        yield from ((stage, kind, num_bytes) for kind, num_bytes in stage_state(plan, stage, seen))


def stage_state(plan: Plan, stage: Stage, seen: Collection[str] = ()) -> Iterator[tuple[StateKind, int]]:
    """(part, bytes) of every parameter of a stage on one of its ranks, but for those that were seen."""
    seen = set(seen)
    known: dict[tuple[object, ...], list[tuple[StateKind, int]]] = {}  # of weights of the same shape
    kinds = {of_experts: _state_kinds(plan, stage, of_experts=of_experts) for of_experts in (False, True)}
    for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
        for parameter in (each for each in layer.parameters() if each.name not in seen):
            seen.add(parameter.name)
            of_experts = stage.ep > 1 and is_of_expert(parameter)
            if (shape := (parameter.shape, parameter.shard, of_experts, layer.trainable)) not in known:
                held = kinds[of_experts][: 3 if layer.trainable else 1]
                elements = held_elements(parameter, stage)
                known[shape] = [(kind, ceil(elements * size / parts)) for kind, size, parts in held]
            yield from known[shape]


def _state_kinds(plan: Plan, stage: Stage, *, of_experts: bool) -> tuple[tuple[StateKind, int, int], ...]:
    """What is held of a weight, frozen ones the first of it: bytes of an element, ranks that share it."""
    settings = plan.settings
    sharding, wide = settings.of(stage.module).sharding, settings.optimizer_precision
    wide_bytes = None if wide is None else wide.num_bytes
    size = state_bytes(settings.precision.num_bytes, settings.kernels, wide_bytes)
    parts = _num_parts(plan, stage, of_experts=of_experts)
    each = {"parameters": size.weight, GRADIENTS: size.gradient, "optimizer": size.optimizer}
    return tuple(
        (StateKind(part, stage.module), num_bytes, parts if sharding in _SHARDED[part] else 1)
        for part, num_bytes in each.items()
    )


def _num_parts(plan: Plan, stage: Stage, *, of_experts: bool) -> int:
    """Of a sharded state: its holders over the copies that are kept; `optimizer_shards` says which.

    A distributed expert has as many holders in a stage as its ranks hold copies of all experts.
    """
    holders = len(stage.expert_ranks) if of_experts else stage.cp
    return max(1, num_replicas(plan)[stage.module] * holders // plan.settings.of(stage.module).instances)


def updated_elements(plan: Plan, stage: Stage, layer: Layer) -> tuple[float, ...]:
    """Elements of each tensor of a trained layer that the optimizer of one rank updates.

    They are the parameters, or one part of the whole layer where it is sharded or has a wide copy.
    """
    of_experts = [p for p in layer.parameters() if has_expert_parallelism(stage, layer) and is_of_expert(p)]
    own = [p for p in layer.parameters() if p not in of_experts]
    elements = tuple(held_elements(parameter, stage) for parameter in (*own, *of_experts))
    is_sharded = plan.settings.of(stage.module).sharding is not Sharding.NONE
    if not is_sharded and plan.settings.gradient_bytes == plan.settings.precision.num_bytes:
        return elements
    return tuple(
        sum(held_elements(p, stage) for p in held)
        / (_num_parts(plan, stage, of_experts=place > 0) if is_sharded else 1)
        for place, held in enumerate((own, of_experts))
        if held
    )
