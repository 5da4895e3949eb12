"""Bytes of one stage's weights on one rank: parameters, gradients and optimizer state."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from workbench.memory.layer import state_bytes_of
from workbench.model.experts import is_of_expert
from workbench.model.layer import Parameter
from workbench.plan.expert_groups import held_elements
from workbench.plan.gradient_groups import num_replicas, weights_with
from workbench.plan.lowered import Weights
from workbench.plan.optimizer_shards import state_shards
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
    seen, parts_of = set(seen), _Parts(plan, stage)
    known: dict[tuple[object, ...], list[tuple[StateKind, int]]] = {}  # of weights of the same shape
    kinds, layers = _state_kinds(plan, stage), plan.model.module(stage.module).layers
    for index in range(*stage.layers):
        layer = layers[index]
        for parameter in (each for each in layer.parameters() if each.name not in seen):
            seen.add(parameter.name)
            of_experts, parts = stage.ep > 1 and is_of_expert(parameter), parts_of.parts(index, parameter)
            if (shape := (parameter.shape, parameter.shard, of_experts, layer.trainable, parts)) not in known:
                held = kinds[: 3 if layer.trainable else 1]
                elements = held_elements(parameter, stage)
                known[shape] = [
                    (kind, ceil(elements * size / (parts if is_sharded else 1)))
                    for kind, size, is_sharded in held
                ]
            yield from known[shape]


def _state_kinds(plan: Plan, stage: Stage) -> tuple[tuple[StateKind, int, bool], ...]:
    """What is held of a weight, frozen ones the first of it: bytes of an element, whether ranks share it."""
    sharding, size = plan.settings.of(stage.module).sharding, state_bytes_of(plan.settings)
    each = {"parameters": size.weight, GRADIENTS: size.gradient, "optimizer": size.optimizer}
    return tuple(
        (StateKind(part, stage.module), num_bytes, sharding in _SHARDED[part])
        for part, num_bytes in each.items()
    )


class _Parts:
    """Ranks that share a sharded state of weights of a stage: those that hold them, over the copies kept."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._stage, self._layers = stage, plan.model.module(stage.module).layers
        self._shards = state_shards(plan, stage)
        settings = plan.settings.of(stage.module)
        of_unit = num_replicas(plan)[stage.module] * stage.cp // settings.instances
        self._of_unit = max(1, of_unit) if settings.sharding is Sharding.PARAMETERS else 1

    def weights(self, index: int, parameter: Parameter) -> Weights:
        return weights_with(self._stage, index, self._layers[index], parameter)

    def parts(self, index: int, parameter: Parameter) -> int:
        return self._shards.get(self.weights(index, parameter), self._of_unit)


def updated_elements(plan: Plan, stage: Stage, index: int) -> tuple[float, ...]:
    """Elements of each tensor of a trained layer of the stage that the optimizer of one rank updates.

    They are the parameters, or one part of all that travel together where it is sharded or has a wide copy.
    """
    parameters = plan.model.module(stage.module).layers[index].parameters()
    is_sharded = plan.settings.of(stage.module).sharding is not Sharding.NONE
    if not is_sharded and plan.settings.gradient_bytes == plan.settings.precision.num_bytes:
        return tuple(held_elements(parameter, stage) for parameter in parameters)
    parts_of = _Parts(plan, replace(stage, layers=(index, index + 1)))
    together: dict[Weights, float] = {}
    for each in parameters:
        weights, elements = parts_of.weights(index, each), held_elements(each, stage)
        together[weights] = together.get(weights, 0.0) + elements / parts_of.parts(index, each)
    return tuple(together.values())
