"""Memory of one stage's weights on one rank: parameters, gradients and optimizer state."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from workbench.memory.layer import ADAMW_MOMENTS, MUON_MOMENTS, state_bytes_of
from workbench.model.experts import is_of_expert
from workbench.model.layer import Parameter
from workbench.model.trained import trained_parameters, trains
from workbench.plan.expert_groups import held_elements
from workbench.plan.gradient_groups import num_replicas, weights_with
from workbench.plan.lowered import Weights
from workbench.plan.muon import matrices_of
from workbench.plan.optimizer_shards import state_shards
from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage
from workbench.plan.tied import equal_stages, tied_on


class StateKind(NamedTuple):
    """Which part of a parameter's state, of which module; printed as `optimizer of llm`."""

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
    """Yield (stage, part, bytes) of every parameter on a rank; what stages share counts once, at the first.

    Complexity: O(parameters of the rank's stages).
    """
    first_holder = {
        (stage, tied.name): tied.stages[0] for tied in tied_on(plan, rank) for stage in tied.stages
    }
    for stage in plan.stages_on.get(rank, ()):
        if equal_stages(plan, stage)[0] != stage.id:
            continue
        counted = {name for (user, name), first in first_holder.items() if user == stage.id != first}
        yield from ((stage, kind, num_bytes) for kind, num_bytes in stage_state(plan, stage, counted))


def stage_state(plan: Plan, stage: Stage, counted: Collection[str] = ()) -> Iterator[tuple[StateKind, int]]:
    """Yield (part, bytes) of every parameter of a stage on one of its ranks, except those already counted."""
    counted, parts_of = set(counted), _Shards(plan, stage)
    bytes_of: dict[tuple[object, ...], list[tuple[StateKind, int]]] = {}
    kinds_of = {count: _state_kinds(plan, stage, count) for count in (ADAMW_MOMENTS, MUON_MOMENTS)}
    layers = plan.model.module(stage.module).layers
    for index in range(*stage.layers):
        layer = layers[index]
        matrices = {parameter.name for parameter in matrices_of(plan.settings, layer)}
        for parameter in (candidate for candidate in layer.parameters() if candidate.name not in counted):
            counted.add(parameter.name)
            of_experts, parts = stage.ep > 1 and is_of_expert(parameter), parts_of.parts(index, parameter)
            is_trained = trains(layer, parameter)
            num_moments = MUON_MOMENTS if parameter.name in matrices else ADAMW_MOMENTS
            shape = parameter.shape, parameter.shard, of_experts, is_trained, parts, num_moments
            if shape not in bytes_of:
                state_kinds = kinds_of[num_moments][: 3 if is_trained else 1]
                elements = held_elements(parameter, stage)
                bytes_of[shape] = [
                    (kind, ceil(elements * size / (parts if is_sharded else 1)))
                    for kind, size, is_sharded in state_kinds
                ]
            yield from bytes_of[shape]


def _state_kinds(plan: Plan, stage: Stage, num_moments: int) -> tuple[tuple[StateKind, int, bool], ...]:
    """Return the parts of a weight's state: bytes per element, and whether sharded; frozen: the first."""
    sharding, size = plan.settings.of(stage.module).sharding, state_bytes_of(plan.settings, num_moments)
    bytes_of = {"parameters": size.weight, GRADIENTS: size.gradient, "optimizer": size.optimizer}
    return tuple(
        (StateKind(part, stage.module), num_bytes, sharding in _SHARDED[part])
        for part, num_bytes in bytes_of.items()
    )


class _Shards:
    """How many shards the state of a stage's weights has: the ranks that hold them, per copy kept."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._stage, self._layers = stage, plan.model.module(stage.module).layers
        self._shards = state_shards(plan, stage)
        settings = plan.settings.of(stage.module)
        num_copies = num_replicas(plan)[stage.module] * stage.num_shares  # of weights; of experts:
        expert_copies = num_copies * stage.tp // stage.ep if stage.ep > 1 else num_copies
        self._of_unit = {
            is_experts: max(1, copies // settings.instances) if settings.shards_parameters else 1
            for is_experts, copies in ((False, num_copies), (True, expert_copies))
        }

    def weights(self, index: int, parameter: Parameter) -> Weights:
        return weights_with(self._stage, index, self._layers[index], parameter)

    def parts(self, index: int, parameter: Parameter) -> int:
        weights = self.weights(index, parameter)
        return self._shards.get(weights, self._of_unit[weights.experts])


def updated_elements(plan: Plan, stage: Stage, index: int) -> tuple[float, ...]:
    """Return the elements of each tensor of a trained layer that AdamW of one rank updates.

    These are its trained parameters, or one shard of all that are reduced together if sharded or with a wide
    copy.
    """
    layer = plan.model.module(stage.module).layers[index]
    matrices = matrices_of(plan.settings, layer)
    parameters = [each for each in trained_parameters(layer) if each not in matrices]
    is_sharded = plan.settings.of(stage.module).sharding is not Sharding.NONE
    if not is_sharded and plan.settings.gradient_bytes == plan.settings.precision.num_bytes:
        return tuple(held_elements(parameter, stage) for parameter in parameters)
    shards_of = _Shards(plan, replace(stage, layers=(index, index + 1)))
    elements_of: dict[Weights, float] = {}
    for updated in parameters:
        weights, elements = shards_of.weights(index, updated), held_elements(updated, stage)
        elements_of[weights] = elements_of.get(weights, 0.0) + elements / shards_of.parts(index, updated)
    return tuple(elements_of.values())
