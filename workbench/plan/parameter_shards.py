"""Stages whose weights are sharded among their replicas and gathered for use (FSDP, HSDP)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.model.experts import is_of_expert
from workbench.model.layer import Layer, Parameter
from workbench.model.trained import frozen_parameters, trained_parameters
from workbench.plan.expert_groups import (
    check_equal_degrees,
    expert_elements,
    expert_holders,
    has_expert_parallelism,
    held_elements,
    weight_holders,
)
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.plan import Plan
from workbench.plan.shard_unit import FlatWeights, RankGroups, ShardUnit
from workbench.plan.stage import Stage
from workbench.schedule.action import Action
from workbench.schedule.sharded import ReshardAfter

_UNITS: LruCache[tuple[ShardUnit, ...]] = LruCache(
    1_000_000, lambda units: sum(len(u.ranks) for u in units) + 1
)


class _Contents(NamedTuple):
    """Weights of a stage, as in `ShardUnit`, and the names of its tied ones."""

    trained: tuple[FlatWeights, ...]
    frozen: tuple[FlatWeights, ...]
    tied: tuple[str, ...]


_Layers = tuple[str, tuple[int, int], int, int]  # of a module, cut by tp and ep ranks
_CONTENTS: LruCache[dict[_Layers, _Contents]] = LruCache(16)  # of models; filled on use
_SPLIT_STAGES: LruCache[tuple[Stage, ...]] = LruCache(1_000_000, len)


def _shards_any(plan: Plan) -> bool:
    return any(settings.shards_parameters for settings in plan.settings.modules)


def is_sharded(plan: Plan, stage: Stage) -> bool:
    """Whether the stage's ranks keep only shards of its weights."""
    return plan.settings.of(stage.module).shards_parameters


@cached_on_instance
def shard_units(plan: Plan) -> tuple[ShardUnit, ...]:
    """Return the shard units of a plan, in the order of its stages. Programs are ignored.

    An instance is consecutive replicas that hold every weight once between them. Instances may be cut unlike
    each other, so they reduce their shards of gradients layer by layer.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.3 (stage 3); Zhao et al. 2023, "PyTorch FSDP",
    sections 3.2.1 (flat parameters) and 3.2.2 (hybrid sharding).

    Raises:
        ValueError: replicas of an instance that are cut unlike each other, replicas with different degrees
            of tensor or expert parallelism, one rank that has nobody to share with, instances of unequal
            sizes, or several of them with stages of several layers.

    Complexity: O(stages + parameters).
    """
    if not _shards_any(plan):
        return ()
    key = Identity(plan.model), value_key(plan.stages), plan.settings.shardings
    return _UNITS.get_or(key, lambda: _units(plan))


def _units(plan: Plan) -> tuple[ShardUnit, ...]:
    by_unit = _stages_of_units(plan)
    contents = _CONTENTS.get_or(Identity(plan.model), dict)
    holders_of: dict[tuple[object, ...], tuple[RankGroups, RankGroups]] = {}  # most layers share grids
    units = []
    for stages in by_unit:
        grids = (*[stage.ranks for stage in stages], stages[0].ep)
        if grids not in holders_of:
            holders_of[grids] = _holders(stages)
        holders, of_experts = holders_of[grids]
        layers_key = _layers_of(stages[0])
        if layers_key not in contents:
            contents[layers_key] = _contents(plan, stages[0])
        trained, frozen, _ = contents[layers_key]
        units.append(
            ShardUnit(
                stages=tuple([stage.id for stage in stages]),
                holders=holders,
                expert_holders=of_experts,
                trained=trained,
                frozen=frozen,
            )
        )
    _check_equal_sizes(plan, units)
    _check_ties(plan, units, contents)
    return tuple(units)


def _stages_of_units(plan: Plan) -> list[list[Stage]]:
    """Return the stages of each unit, one per replica of its instance, checked."""
    stages_of: dict[tuple[str, int, tuple[int, int]], list[Stage]] = {}
    instances: dict[str, dict[int, int]] = {}
    sound: set[tuple[object, ...]] = set()
    for stage in plan.stages:
        if is_sharded(plan, stage):
            if stage.module not in instances:
                instances[stage.module] = _instances(plan, stage.module)
            shape = stage.module, stage.ranks, stage.layers[1] - stage.layers[0]
            if shape not in sound:
                _check_stage(plan, stage)
                sound.add(shape)
            key = stage.module, instances[stage.module][stage.replica], stage.layers
            stages_of.setdefault(key, []).append(stage)
    for (module, instance, layers), stages in stages_of.items():
        replicas = [replica for replica, number in instances[module].items() if number == instance]
        if len(stages) != len(replicas):
            raise ValueError(
                f"module {module!r} shards its weights, so all {len(replicas)} replicas of an instance "
                f"are cut alike; layers [{layers[0]}, {layers[1]}) are a stage in {len(stages)} of them"
            )
    holders: dict[tuple[str, tuple[int, int]], list[Stage]] = {}
    for (module, _, layers), stages in stages_of.items():
        holders.setdefault((module, layers), []).extend(stages)
    for (module, _), stages in holders.items():
        check_equal_degrees(stages, module)
    return list(stages_of.values())


def _instances(plan: Plan, module: str) -> dict[int, int]:
    """Map each replica to the instance that it is part of."""
    replicas, num_instances = sorted(plan.replicas(module)), plan.settings.of(module).instances
    if len(replicas) % num_instances:
        valid = [count for count in range(1, len(replicas) + 1) if len(replicas) % count == 0]
        nearest = min(valid, key=lambda count: (abs(count - num_instances), count))
        raise ValueError(
            f"module {module!r}: instances of sharded weights must divide its {len(replicas)} replicas, "
            f"got {num_instances}; nearest: {nearest}"
        )
    return {replica: index * num_instances // len(replicas) for index, replica in enumerate(replicas)}


def sharded_stages(plan: Plan) -> dict[int, ShardUnit]:
    """Map each sharded stage to its unit."""
    return {stage: unit for unit in shard_units(plan) for stage in unit.stages}


def reshard_after_of(plan: Plan, unit: ShardUnit) -> ReshardAfter:
    """Return how long a unit's weights stay gathered."""
    return plan.settings.of(plan.stage[unit.stages[0]].module).reshard_after


@cached_on_instance
def kept_stages(plan: Plan) -> frozenset[int]:
    """Return the sharded stages whose weights stay gathered for more than a pass."""
    return frozenset(
        stage.id
        for stage in plan.stages
        if plan.settings.of(stage.module).reshard_after is not ReshardAfter.PASS
    )


@cached_on_instance
def stages_reduced_once(plan: Plan) -> frozenset[int]:
    """Return the sharded stages whose weights are gathered, and whose gradients are reduced, once a step."""
    return frozenset(stage.id for stage in plan.stages if plan.settings.of(stage.module).is_gathered_once)


def unit_of(units: Mapping[int, ShardUnit], action: Action) -> ShardUnit:
    """Return the unit that a round's action is about; ValueError if its stage has none."""
    if action.stage is None or action.stage not in units:
        raise ValueError(f"action {action}: the weights of stage {action.stage} are not sharded")
    return units[action.stage]


def in_units(draft: Plan) -> Plan:
    """Return the draft with every layer of a sharded module as a stage of its own, on the same ranks.

    So ranks gather layer by layer. Stages are renumbered in their order.
    """
    if not _shards_any(draft) and [stage.id for stage in draft.stages] == list(range(len(draft.stages))):
        return draft
    sharded = tuple(settings.module for settings in draft.settings.modules if settings.shards_parameters)
    key = value_key(draft.stages), sharded
    return replace(draft, stages=_SPLIT_STAGES.get_or(key, lambda: _split_by_layer(draft.stages, sharded)))


def _split_by_layer(stages: tuple[Stage, ...], sharded: tuple[str, ...]) -> tuple[Stage, ...]:
    split: list[Stage] = []
    for stage in stages:
        first, last = stage.layers
        cuts = [(i, i + 1) for i in range(first, last)] if stage.module in sharded else [stage.layers]
        split += [stage.holding(layers, number) for number, layers in enumerate(cuts, len(split))]
    return tuple(split)


def _check_stage(plan: Plan, stage: Stage) -> None:
    settings, where = plan.settings.of(stage.module), f"stage {stage.id} of {stage.module!r}"
    if stage.num_shares * len(plan.replicas(stage.module)) == settings.instances:
        raise ValueError(
            f"{where}: parameters are sharded among the ranks that hold the same weights, and one rank "
            "holds them alone; nearest: sharding 'none'"
        )
    if settings.instances > 1 and stage.layers[1] - stage.layers[0] > 1:
        raise ValueError(
            f"{where}: its {settings.instances} instances add up gradients layer by layer, want one layer a "
            f"stage, got [{stage.layers[0]}, {stage.layers[1]})"
        )


def _holders(stages: Sequence[Stage]) -> tuple[RankGroups, RankGroups]:
    """Return the ranks of a stage's replicas that hold the same weights, and the same distributed experts."""
    ranks = [rank for stage in stages for rank in stage.flat_ranks]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"stages {[stage.id for stage in stages]}: replicas of sharded weights share a rank")
    return weight_holders(stages), expert_holders(stages) if stages[0].ep > 1 else ()


def _layers_of(stage: Stage) -> _Layers:
    return stage.module, stage.layers, stage.tp, stage.ep


def _contents(plan: Plan, stage: Stage) -> _Contents:
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    trained, frozen = (_flat_weights(stage, layers, held) for held in (trained_parameters, frozen_parameters))
    return _Contents(trained, frozen, tuple(sorted({name for layer in layers for _, name in layer.tied})))


def _flat_weights(
    stage: Stage, layers: Iterable[Layer], held: Callable[[Layer], tuple[Parameter, ...]]
) -> tuple[FlatWeights, ...]:
    """Return the trained or the frozen weights of a stage's layers as flat tensors."""
    own = of_experts = 0
    tied: dict[str, int] = {}
    for layer in layers:
        shared = {name for _, name in layer.tied}
        is_distributed = has_expert_parallelism(stage, layer)
        has_experts = False
        for parameter in held(layer):
            if is_distributed and is_of_expert(parameter):
                has_experts = True
                continue
            num_elements = int(held_elements(parameter, stage))
            if parameter.name in shared:
                tied[parameter.name] = num_elements
            else:
                own += num_elements
        of_experts += expert_elements(layer, stage) if has_experts else 0
    tensors = (*map(FlatWeights, (own, *tied.values())), FlatWeights(of_experts, experts=True))
    return tuple(flat for flat in tensors if flat.num_elements)


def _check_equal_sizes(plan: Plan, units: Iterable[ShardUnit]) -> None:
    """Check that the i-th shard of a weight is the same in every instance."""
    sizes: dict[str, int] = {}
    for unit in units:
        module = plan.stage[unit.stages[0]].module
        num_shards = unit.num_shards(experts=False)
        size = sizes.setdefault(module, num_shards)
        if num_shards != size:
            raise ValueError(
                f"module {module!r}: stages {list(unit.stages)} shard their weights among "
                f"{num_shards} ranks, others among {size}; want one number"
            )


def _check_ties(plan: Plan, units: Iterable[ShardUnit], contents: Mapping[_Layers, _Contents]) -> None:
    """Check that holders of a tied weight share all ranks or none, so that a rank has one shard of it."""
    holders: dict[tuple[str, str], list[tuple[int, ShardUnit]]] = {}
    for unit in units:
        stage = plan.stage[unit.stages[0]]
        for name in contents[_layers_of(stage)].tied:
            others = holders.setdefault((stage.module, name), [])
            for other, first in others:
                if first.ranks != unit.ranks and set(first.ranks) & set(unit.ranks):
                    raise ValueError(
                        f"module {stage.module!r} shards its weights, but {name!r} is tied between "
                        f"stages {other} and {stage.id}, which have some of their ranks in common; want all "
                        "or none; nearest: sharding 'optimizer'"
                    )
            others.append((stage.id, unit))
