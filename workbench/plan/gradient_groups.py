"""Which ranks hold the same weights and sum their gradients, and which action does it."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from workbench.model.experts import is_of_expert
from workbench.model.layer import Layer, Parameter, Shard
from workbench.model.model_graph import ModelGraph, Module
from workbench.plan.expert_groups import (
    check_equal_degrees,
    expert_elements,
    expert_holders,
    has_expert_parallelism,
)
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.parameter_shards import ShardUnit, sharded_stages
from workbench.plan.plan import Plan, Stage
from workbench.plan.tied import equal_stages
from workbench.schedule.action import REDUCTIONS, Action, reduction_of

_MOST_RANKS = 1_000_000  # of all groups that are cached
_OF_PLAN: LruCache[tuple[GradientGroup, ...]] = LruCache(64)  # of the last stages
_ORDERS: LruCache[tuple[int, ...]] = LruCache(64)
_OF_MODULE: LruCache[tuple[GradientGroup, ...]] = LruCache(
    _MOST_RANKS, lambda groups: sum(len(group.ranks) for group in groups) + 1
)


class _Held:
    """What stages of a model hold, each kind of stage looked at once."""

    def __init__(self, model: ModelGraph) -> None:
        self._model = model
        self._weights: dict[tuple[str, tuple[int, int], bool], tuple[Weights, ...]] = {}
        self._elements: dict[tuple[Weights, int, int], int] = {}

    def weights(self, stage: Stage) -> tuple[Weights, ...]:
        """Trainable weights of a stage, each once, last layer first."""
        key, known = (stage.module, stage.layers, stage.ep > 1), self._weights
        if key not in known:
            known[key] = _weights_in(self._model.module(stage.module), stage)
        return known[key]

    def elements(self, weights: Weights, stage: Stage) -> int:
        """Elements that one rank of the stage holds of these weights."""
        key, known = (weights, stage.tp, stage.ep), self._elements
        if key not in known:
            known[key] = _elements(self._model.module(weights.module), weights, stage)
        return known[key]


_HELD: LruCache[_Held] = LruCache(16)


def _held(plan: Plan) -> _Held:
    return _HELD.get_or(Identity(plan.model), lambda: _Held(plan.model))


@cached_on_instance
def gradient_groups(plan: Plan) -> tuple[GradientGroup, ...]:
    """One group per layer and grid place: the ranks that hold it in any replica.

    Order: modules last to first, layers descending, tied weights where their first layer
    stands; every rank issues its groups in this order. Of weights that are sharded, there is a
    group per part: the ranks that hold it in any instance.
    """
    sharding = tuple((each.module, each.sharding, each.instances) for each in plan.settings.modules)
    key = Identity(plan.model), value_key(plan.stages), sharding
    return _OF_PLAN.get_or(key, lambda: tuple(itertools.chain.from_iterable(_by_module(plan))))


def _by_module(plan: Plan) -> Iterator[tuple[GradientGroup, ...]]:
    """A module's groups follow from its stages; plans that differ in another share them."""
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
        groups = _OF_MODULE.get_or(key, partial(_of_module, plan, module, chains, units, num_groups))
        num_groups += len(groups)
        yield groups


def _of_module(
    plan: Plan,
    module: Module,
    chains: Sequence[Sequence[Stage]],
    units: dict[int, ShardUnit],
    first_index: int,
) -> tuple[GradientGroup, ...]:
    held, holders = _held(plan), defaultdict[Weights, list[Stage]](list)
    for chain in chains:
        for stage in reversed(chain):
            for weights in held.weights(stage):
                holders[weights].append(stage)
    groups: list[GradientGroup] = []
    known: dict[tuple[bool, tuple[int, ...]], tuple[tuple[int, ...], ...]] = {}  # most layers lie alike
    for weights in sorted(holders, key=lambda w: -_first_layer(module.layers, w)):
        stages = holders[weights]
        unit = units.get(stages[0].id)
        num_elements = held.elements(weights, stages[0])
        key = weights.experts, tuple([stage.id for stage in stages])
        if key not in known:
            known[key] = _grid_holders(weights, stages) if unit is None else _part_holders(stages, units)
        groups += [
            GradientGroup(
                index=index,
                ranks=ranks,
                weights=(weights,),
                num_elements=num_elements if unit is None else unit.part(num_elements),
            )
            for index, ranks in enumerate(known[key], first_index + len(groups))
        ]
    return tuple(groups)


def trained_weights(plan: Plan, stage: Stage) -> tuple[Weights, ...]:
    """Those that a stage sums gradients of, each once, last layer first."""
    return _held(plan).weights(stage)


def weights_with(stage: Stage, index: int, layer: Layer, parameter: Parameter) -> Weights:
    """The weights among which a parameter of a layer travels: its own, or experts', or a tied one alone."""
    if parameter.name in dict(layer.tied).values():
        return Weights(stage.module, None, parameter.name)
    return Weights(stage.module, index, experts=stage.ep > 1 and is_of_expert(parameter))


def group_on(plan: Plan, weights: Weights, rank: int) -> GradientGroup:
    """The group in which a rank that holds these weights sums their gradients."""
    return next(group for group in _groups_of_weights(plan)[weights] if rank in group.members)


@cached_on_instance
def _groups_of_weights(plan: Plan) -> dict[Weights, list[GradientGroup]]:
    found: dict[Weights, list[GradientGroup]] = {}
    for group in gradient_groups(plan):
        found.setdefault(group.weights[0], []).append(group)
    return found


@cached_on_instance
def num_replicas(plan: Plan) -> dict[str, int]:
    """Module -> replicas among which its gradients are added up and its state is sharded."""
    return {module.name: len(plan.replicas(module.name)) for module in plan.model.modules}


def reductions(plan: Plan, groups: tuple[GradientGroup, ...]) -> dict[Action, tuple[int, ...]]:
    """Which groups each stage's reduction sums.

    A tied weight is reduced once on a rank, with the last of its module's stages there, whether that
    uses it or not: so all ranks come to it behind the same layers. Stages whose weights are sharded
    reduce in rounds (see `shard_units`); behind them they add up their parts over instances, and over
    the other stages that use a tied weight.
    """
    found: dict[Action, tuple[int, ...]] = {}
    by_weights: dict[Weights, list[GradientGroup]] = {}
    for group in groups:
        if len(group.ranks) > 1:
            by_weights.setdefault(group.weights[0], []).append(group)
    is_last = _last_reducers(plan)
    held_by = _held(plan)
    weights_of = {stage.id: held_by.weights(stage) for stage in plan.stages}
    tied: dict[tuple[str, int, int], dict[Weights, None]] = {}  # by module, replica and first rank
    for stage in plan.stages:
        held = tied.setdefault((stage.module, stage.replica, stage.flat_ranks[0]), {})
        held.update((weights, None) for weights in weights_of[stage.id] if weights.shared is not None)
    for stage in plan.stages:
        if not _reduces(plan, stage):
            continue
        own = [weights for weights in weights_of[stage.id] if weights.shared is None]
        key = stage.module, stage.replica, stage.flat_ranks[0]
        mine = [
            group.index
            for weights in (*own, *(tied[key] if is_last[stage.id] else ()))
            for group in by_weights.get(weights, ())
            if not group.members.isdisjoint(stage.flat_ranks)
        ]
        if mine:
            found[reduction_of(stage.id)] = tuple(sorted(mine))
    return found


@cached_on_instance
def reduction_order(plan: Plan) -> tuple[int, ...]:
    """Stages that hold weights which other ranks hold too, in the order in which they are reduced.

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
    found: list[tuple[int, int]] = []
    held_by = _held(plan)
    known: dict[tuple[str, tuple[int, int], int], int | None] = {}  # the same in all replicas
    for stage in plan.stages:
        key = stage.module, stage.layers, stage.ep
        if key not in known:
            mine = (first_group[w] for w in held_by.weights(stage) if w in first_group)
            known[key] = min(mine, default=None)
        if (first := known[key]) is not None:
            found.append((first, stage.id))
    return tuple(stage for _, stage in sorted(found))


def _weights_in(module: Module, stage: Stage) -> tuple[Weights, ...]:
    layers = module.layers
    found: dict[Weights, None] = {}
    for index in reversed(range(*stage.layers)):
        if layers[index].trainable:
            if _has_own(layers[index]):
                found[Weights(stage.module, index)] = None
            if has_expert_parallelism(stage, layers[index]):
                found[Weights(stage.module, index, experts=True)] = None
            found.update((Weights(stage.module, None, shared), None) for _, shared in layers[index].tied)
    return tuple(found)


def _has_own(layer: Layer) -> bool:
    """Whether the layer has weights that it shares with no other."""
    shared = {name for _, name in layer.tied}
    return any(parameter.name not in shared for parameter in layer.parameters())


def _first_layer(layers: tuple[Layer, ...], weights: Weights) -> float:
    if weights.layer is not None:
        return weights.layer
    users = (i for i, layer in enumerate(layers) if weights.shared in dict(layer.tied).values())
    return next(users) - 0.5


def _grid_holders(weights: Weights, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Ranks by tensor-parallel place: all context-parallel ranks and replicas at that place.

    Of distributed experts by place among the ranks that hold them.
    """
    if len({stage.tp for stage in stages}) > 1:
        degrees = sorted({stage.tp for stage in stages})
        raise ValueError(
            f"module {weights.module!r}: replicas with different tensor-parallel degrees "
            f"{degrees} are refused; give all replicas one tp"
        )
    check_equal_degrees(stages, weights.module)
    if weights.experts:
        return expert_holders(stages)
    return tuple(
        tuple(sorted({row[index] for stage in stages for row in stage.ranks}))
        for index in range(stages[0].tp)
    )


def _part_holders(stages: Iterable[Stage], units: Mapping[int, ShardUnit]) -> tuple[tuple[int, ...], ...]:
    """Ranks by part of sharded weights: those at its place in every unit that holds them."""
    held = {units[stage.id].ranks for stage in stages}
    return tuple(tuple(sorted(set(places))) for places in zip(*held, strict=True))


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
    own = (p for p in layer.parameters() if p.name not in shared_names)
    if has_expert_parallelism(stage, layer):
        own = (p for p in own if not is_of_expert(p))
    return sum(p.num_elements // (1 if p.shard is Shard.REPLICATED else tp) for p in own)


def _reduces(plan: Plan, stage: Stage) -> bool:
    """Whether no equal stage of its rank is reduced later; all of them add to the same gradients."""
    equal = equal_stages(plan, stage)
    if len(equal) == 1:
        return True
    ordered = [a.stage for a in plan.program.get(stage.flat_ranks[0], ()) if a.kind in REDUCTIONS]
    return stage.id == next((other for other in reversed(ordered) if other in equal), equal[-1])


def _last_reducers(plan: Plan) -> dict[int, bool]:
    """Stage -> whether its ranks reduce no other stage of its module and replica later."""
    found: dict[int, bool] = {}
    for chain in plan.chain.values():
        latest: dict[int, int] = {}  # by rank: of the chain's stages the one that is reduced last
        for stage in reversed(chain):
            latest[stage.flat_ranks[0]] = stage.id
        ids = {stage.id for stage in chain}
        for rank in latest:
            for action in plan.program.get(rank, ()):
                if action.kind in REDUCTIONS and action.stage in ids:
                    latest[rank] = action.stage
        found |= {stage.id: latest[stage.flat_ranks[0]] == stage.id for stage in chain}
    return found
