"""Which ranks hold the same weights and reduce their gradients, and by which action."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from workbench.model.experts import is_of_expert
from workbench.model.layer import Layer, Parameter, Shard
from workbench.model.model_graph import ModelGraph, Module
from workbench.model.trained import is_trained, trained_parameters
from workbench.plan.expert_groups import (
    check_equal_degrees,
    expert_elements,
    expert_holders,
    has_expert_parallelism,
    weight_holders,
)
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.parameter_shards import sharded_stages
from workbench.plan.plan import Plan
from workbench.plan.shard_unit import FlatWeights, ShardUnit
from workbench.plan.stage import Stage
from workbench.plan.tied import equal_stages
from workbench.schedule.action import REDUCTIONS, Action, reduction_of

_MOST_RANKS = 1_000_000  # in all cached groups together
_OF_PLAN: LruCache[tuple[GradientGroup, ...]] = LruCache(64)  # of the last stages
_ORDERS: LruCache[tuple[int, ...]] = LruCache(64)
_OF_MODULE: LruCache[tuple[GradientGroup, ...]] = LruCache(
    _MOST_RANKS, lambda groups: sum(len(group.ranks) for group in groups) + 1
)


class _ModelWeights:
    """Weights and element counts of a model's stages, computed once per kind of stage."""

    def __init__(self, model: ModelGraph) -> None:
        self._model = model
        self._weights: dict[tuple[str, tuple[int, int], bool], tuple[Weights, ...]] = {}
        self._elements: dict[tuple[Weights, int, int], int] = {}

    def weights(self, stage: Stage) -> tuple[Weights, ...]:
        """Return the trainable weights of a stage, each once, last layer first."""
        key, cache = (stage.module, stage.layers, stage.ep > 1), self._weights
        if key not in cache:
            cache[key] = _weights_in(self._model.module(stage.module), stage)
        return cache[key]

    def elements(self, weights: Weights, stage: Stage) -> int:
        """Return how many elements of these weights one rank of the stage holds."""
        key, cache = (weights, stage.tp, stage.ep), self._elements
        if key not in cache:
            cache[key] = _elements(self._model.module(weights.module), weights, stage)
        return cache[key]


_MODEL_WEIGHTS: LruCache[_ModelWeights] = LruCache(16)


def _model_weights(plan: Plan) -> _ModelWeights:
    return _MODEL_WEIGHTS.get_or(Identity(plan.model), lambda: _ModelWeights(plan.model))


@cached_on_instance
def gradient_groups(plan: Plan) -> tuple[GradientGroup, ...]:
    """Return a group per layer and tensor-parallel index: the ranks of all replicas that hold the weights.

    Order: modules last to first, layers descending, tied weights at their first layer; every rank
    issues its groups in this order. Sharded weights have a group per shard: the ranks that hold it in any
    instance.
    """
    key = Identity(plan.model), value_key(plan.stages), plan.settings.shardings
    return _OF_PLAN.get_or(key, lambda: tuple(itertools.chain.from_iterable(_groups_by_module(plan))))


def _groups_by_module(plan: Plan) -> Iterator[tuple[GradientGroup, ...]]:
    """Yield every module's groups; they follow from its stages, so plans that differ elsewhere share them."""
    units, num_groups = sharded_stages(plan), 0
    for module in reversed(plan.model.modules):
        chains = [plan.chain[module.name, replica] for replica in plan.replicas(module.name)]
        settings = plan.settings.of(module.name)
        key = (
            Identity(plan.model),
            module.name,
            settings.sharding,
            settings.instances,
            tuple(tuple((stage.layers, stage.ranks, stage.ep) for stage in chain) for chain in chains),
            num_groups,
        )
        groups = _OF_MODULE.get_or(key, partial(_module_groups, plan, module, chains, units, num_groups))
        num_groups += len(groups)
        yield groups


def _module_groups(
    plan: Plan,
    module: Module,
    chains: Sequence[Sequence[Stage]],
    units: dict[int, ShardUnit],
    first_index: int,
) -> tuple[GradientGroup, ...]:
    model_weights, holders = _model_weights(plan), defaultdict[Weights, list[Stage]](list)
    for chain in chains:
        for stage in reversed(chain):
            for weights in model_weights.weights(stage):
                holders[weights].append(stage)
    groups: list[GradientGroup] = []
    # By grids: most layers are on the same ranks.
    ranks_of: dict[tuple[bool, tuple[int, ...]], tuple[tuple[int, ...], ...]] = {}
    for weights in sorted(holders, key=lambda w: -_first_layer(module.layers, w)):
        stages = holders[weights]
        unit = units.get(stages[0].id)
        num_elements = model_weights.elements(weights, stages[0])
        if unit is not None:
            num_elements = unit.part(FlatWeights(num_elements, weights.experts))
        key = weights.experts, tuple([stage.id for stage in stages])
        if key not in ranks_of:
            holders_of = _grid_holders if unit is None else partial(_shard_holders, units)
            ranks_of[key] = holders_of(weights, stages)
        groups += [
            GradientGroup(
                index=index,
                ranks=ranks,
                weights=(weights,),
                num_elements=num_elements,
            )
            for index, ranks in enumerate(ranks_of[key], first_index + len(groups))
        ]
    return tuple(groups)


def trained_weights(plan: Plan, stage: Stage) -> tuple[Weights, ...]:
    """Return the weights whose gradients a stage reduces, each once, last layer first."""
    return _model_weights(plan).weights(stage)


def weights_with(stage: Stage, index: int, layer: Layer, parameter: Parameter) -> Weights:
    """Return the weights that a parameter is part of: its layer's own, the layer's experts, or a tied one."""
    if parameter.name in dict(layer.tied).values():
        return Weights(stage.module, None, parameter.name)
    return Weights(stage.module, index, experts=stage.ep > 1 and is_of_expert(parameter))


def group_on(plan: Plan, weights: Weights, rank: int) -> GradientGroup:
    """Return the group in which a rank that holds these weights reduces their gradients."""
    return next(group for group in _groups_of_weights(plan)[weights] if rank in group.members)


@cached_on_instance
def _groups_of_weights(plan: Plan) -> dict[Weights, list[GradientGroup]]:
    groups_of: dict[Weights, list[GradientGroup]] = {}
    for group in gradient_groups(plan):
        groups_of.setdefault(group.weights[0], []).append(group)
    return groups_of


@cached_on_instance
def num_replicas(plan: Plan) -> dict[str, int]:
    """Map each module to the replicas over which its gradients are reduced and its state is sharded."""
    return {module.name: len(plan.replicas(module.name)) for module in plan.model.modules}


def reductions(plan: Plan, groups: tuple[GradientGroup, ...]) -> dict[Action, tuple[int, ...]]:
    """Return the groups that each stage's reduction covers, as indices in issue order.

    A rank reduces a tied weight once, with the last of its module's stages there, whether that uses the
    weight or not: so all ranks come to it after the same layers. Stages whose weights are sharded reduce in
    rounds (see `shard_units`); after those they reduce their shards over instances, and over the other stages
    that use a tied weight.
    """
    groups_of: dict[Action, tuple[int, ...]] = {}
    by_weights: dict[Weights, list[GradientGroup]] = {}
    for group in groups:
        if len(group.ranks) > 1:
            by_weights.setdefault(group.weights[0], []).append(group)
    if not by_weights:
        return groups_of
    is_last_reducer = _last_reducers(plan)
    model_weights = _model_weights(plan)
    weights_of = {stage.id: model_weights.weights(stage) for stage in plan.stages}
    tied: dict[tuple[str, int, int], dict[Weights, None]] = {}  # by module, replica and first rank
    for stage in plan.stages:
        tied_here = tied.setdefault((stage.module, stage.replica, stage.flat_ranks[0]), {})
        tied_here.update((weights, None) for weights in weights_of[stage.id] if weights.shared is not None)
    for stage in plan.stages:
        if not _is_reduced(plan, stage):
            continue
        untied = [weights for weights in weights_of[stage.id] if weights.shared is None]
        ranks = stage.flat_ranks
        key = stage.module, stage.replica, ranks[0]
        own_groups = [
            group.index
            for weights in (*untied, *(tied[key] if is_last_reducer[stage.id] else ()))
            for group in by_weights.get(weights, ())
            if not group.members.isdisjoint(ranks)
        ]
        if own_groups:
            groups_of[reduction_of(stage.id)] = tuple(sorted(own_groups))
    return groups_of


@cached_on_instance
def reduction_order(plan: Plan) -> tuple[int, ...]:
    """Return the stages with weights that other ranks hold too, in the order in which they are reduced.

    One order for the whole plan: where a rank has several stages, all ranks reduce the same
    groups in the same order, so that no two wait for each other.
    """
    groups = gradient_groups(plan)
    return _ORDERS.get_or((Identity(groups), value_key(plan.stages)), lambda: _reduction_order(plan, groups))


def _reduction_order(plan: Plan, groups: Iterable[GradientGroup]) -> tuple[int, ...]:
    first_group: dict[Weights, int] = {}
    for group in groups:
        if len(group.ranks) > 1:
            first_group.setdefault(group.weights[0], group.index)
    ordered: list[tuple[int, int]] = []
    model_weights = _model_weights(plan)
    first_of: dict[tuple[str, tuple[int, int], int], int | None] = {}  # the same in all replicas
    for stage in plan.stages:
        key = stage.module, stage.layers, stage.ep
        if key not in first_of:
            indices = (first_group[w] for w in model_weights.weights(stage) if w in first_group)
            first_of[key] = min(indices, default=None)
        if (first := first_of[key]) is not None:
            ordered.append((first, stage.id))
    return tuple(stage for _, stage in sorted(ordered))


def _weights_in(module: Module, stage: Stage) -> tuple[Weights, ...]:
    layers = module.layers
    ordered: dict[Weights, None] = {}
    for index in reversed(range(*stage.layers)):
        if is_trained(layers[index]):
            if _has_untied(layers[index]):
                ordered[Weights(stage.module, index)] = None
            if layers[index].trainable and has_expert_parallelism(stage, layers[index]):
                ordered[Weights(stage.module, index, experts=True)] = None
            ordered.update((Weights(stage.module, None, shared), None) for _, shared in layers[index].tied)
    return tuple(ordered)


def _has_untied(layer: Layer) -> bool:
    """Whether the layer has trained weights that it shares with no other layer."""
    shared = {name for _, name in layer.tied}
    return any(parameter.name not in shared for parameter in trained_parameters(layer))


def _first_layer(layers: tuple[Layer, ...], weights: Weights) -> float:
    if weights.layer is not None:
        return weights.layer
    users = (i for i, layer in enumerate(layers) if weights.shared in dict(layer.tied).values())
    return next(users) - 0.5


def _grid_holders(weights: Weights, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return, per tensor-parallel index, the ranks that hold these weights in all replicas.

    Distributed experts: per expert-parallel index.
    """
    check_equal_degrees(stages, weights.module)
    if weights.experts:
        return expert_holders(stages)
    return weight_holders(stages)


def _shard_holders(
    units: Mapping[int, ShardUnit], weights: Weights, stages: Iterable[Stage]
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each shard: those at its index in every unit that holds the weights."""
    groups_of_units = {units[stage.id].groups(experts=weights.experts) for stage in stages}
    flat = (itertools.chain(*groups) for groups in groups_of_units)
    return tuple(tuple(sorted(set(ranks))) for ranks in zip(*flat, strict=True))


def _elements(module: Module, weights: Weights, stage: Stage) -> int:
    layers, tp = module.layers, stage.tp
    if weights.layer is None:
        named = {p.name: p for layer in layers for p in layer.parameters()}
        shared = named[weights.shared or ""]
        return shared.num_elements // (1 if shared.shard is Shard.REPLICATED else tp)
    layer = layers[weights.layer]
    if weights.experts:
        return expert_elements(layer, stage)
    shared_names = {shared for _, shared in layer.tied}
    parameters = (p for p in trained_parameters(layer) if p.name not in shared_names)
    if has_expert_parallelism(stage, layer):
        parameters = (p for p in parameters if not is_of_expert(p))
    return sum(p.num_elements // (1 if p.shard is Shard.REPLICATED else tp) for p in parameters)


def _is_reduced(plan: Plan, stage: Stage) -> bool:
    """Whether no equal stage on its rank is reduced later; all of them add to the same gradients."""
    equal = equal_stages(plan, stage)
    if len(equal) == 1:
        return True
    ordered = [a.stage for a in plan.program.get(stage.flat_ranks[0], ()) if a.kind in REDUCTIONS]
    return stage.id == next((other for other in reversed(ordered) if other in equal), equal[-1])


def _last_reducers(plan: Plan) -> dict[int, bool]:
    """Map each stage to whether its ranks reduce no other stage of its module and replica later."""
    is_last: dict[int, bool] = {}
    for chain in plan.chain.values():
        latest: dict[int, int] = {}  # by rank: of the chain's stages the one that is reduced last
        for stage in reversed(chain):
            latest[stage.flat_ranks[0]] = stage.id
        ids = {stage.id for stage in chain}
        for rank in latest:
            for action in plan.program.get(rank, ()):
                if action.kind in REDUCTIONS and action.stage in ids:
                    latest[rank] = action.stage
        is_last |= {stage.id: latest[stage.flat_ranks[0]] == stage.id for stage in chain}
    return is_last
