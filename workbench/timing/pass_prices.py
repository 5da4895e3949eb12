"""Seconds of the passes of a plan's stages over their microbatches, computed once for equal ones."""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from math import isnan, nan

from workbench.cost.collectives import Collective
from workbench.cost.group_link import busy_share
from workbench.cost.hardware import Cluster
from workbench.cost.layer_time import slowest
from workbench.cost.model import CostModel, LayerTime, Work
from workbench.cost.overlapped_collectives import loss_on
from workbench.float_sum import float_sum
from workbench.model.block_modules import BlockModule, part_of
from workbench.model.layer import Layer, TokenCount
from workbench.plan.contents import contents, contents_and_needs
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.narrow_products import multiplying
from workbench.plan.parameter_shards import sharded_stages, unit_of
from workbench.plan.partial_weights import partial_weights
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.recomputed_layers import recomputed_in
from workbench.plan.routing import routing_of
from workbench.plan.sequence import dividing, token_borders
from workbench.plan.shard_unit import ShardUnit
from workbench.plan.stage import Stage
from workbench.plan.work import row_kinds, works_of
from workbench.schedule.action import Action, Pass, measured_as
from workbench.schedule.sharded import ReshardAfter
from workbench.timing.attention import (
    AttentionModel,
    Times,
    identity_of,
    times_of,
    with_attention,
    without_attention,
)
from workbench.timing.grid_links import GridCost, GridLinks, grid_links, neighbour_link
from workbench.timing.pass_times import PassTimes, pace, pass_times, with_gathers
from workbench.timing.weights import CollectivePrices

Works = Callable[[Plan, Microbatch], tuple[Work, ...]]
"""Work of a microbatch on each context-parallel rank that may be the slowest."""

_STAGE_TIMES: LruCache[PassTimes] = LruCache(65_536)
_SHAPES: LruCache[list[tuple[object, ...]]] = LruCache(500_000, lambda shapes: len(shapes) + 1)


def machines(cost: CostModel, cluster: Cluster) -> Callable[[Sequence[int]], CostModel]:
    """Map ranks to their machine; ValueError if they are of several kinds. A method would make a cycle."""

    @cache
    def of(ranks: tuple[int, ...]) -> CostModel:
        return cost.on(cluster.device_of(ranks))

    return lambda ranks: of(tuple(ranks))


class PassPrices:
    """Prices of passes; a plan needs no programs for them.

    Args:
        plan: its stages, microbatches and settings.
        cost_of: machine of some ranks.
        attention: as in `price`.
        works: work of each rank, see `works_of`.
    """

    def __init__(
        self,
        plan: Plan,
        cost_of: Callable[[Sequence[int]], CostModel],
        attention: AttentionModel | None,
        works: Works = works_of,
    ) -> None:
        self._plan, self._attention, self._attention_identity = plan, attention, identity_of(attention)
        self._works = works
        self._cost_of, self._collectives = cost_of, CollectivePrices(plan, cost_of)
        self._routing = routing_of(plan)
        self._units = sharded_stages(plan)
        self._slowed_s = loss_on(plan.cluster)
        self._times_of_kind: dict[tuple[int, int], PassTimes] = {}
        self._cost_on = {stage.id: self._stage_cost(stage) for stage in plan.stages}
        self._links = {stage.id: grid_links(plan.cluster, stage) for stage in plan.stages}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._stage_kind = {stage.id: self._kind(self._shape(stage)) for stage in plan.stages}
        self._unit_kind: dict[int, int] = {}
        self._microbatch_kinds: dict[tuple[str, int], list[int]] = {}
        self._rounds_s: dict[tuple[int, Pass], float] = {}  # by unit, the same for all replicas
        self._passes_s: dict[tuple[int | None, Pass], list[float]] = {}  # by stage and kind
        self._passes_of_kind: dict[tuple[object, ...], list[float]] = {}  # the same lists
        self._unmeasured: set[str] = set()

    @property
    def unmeasured(self) -> set[str]:
        """What went into prices that was not measured."""
        return self._unmeasured | self._collectives.unmeasured

    def duration_s(self, action: Action) -> float:
        """Return the seconds of a pass on its slowest rank.

        Raises:
            ValueError: a pass without a microbatch, or a backward of a stage in which no gradient runs.

        Complexity: O(1), and once per stage and kind O(microbatches).
        """
        stage, kind, microbatch = action
        passes_s = self._passes_s.get((stage, kind))
        if passes_s is None:
            passes_s = self._passes_s[stage, kind] = self._passes_like(self.stage_of(action), kind)
        if microbatch is None or not 0 <= microbatch < len(passes_s):
            module = self.stage_of(action).module
            raise ValueError(f"action {action}: {module!r} has no microbatch {action.microbatch}")
        if isnan(passes_s[microbatch]):
            raise ValueError(f"action {action}: no gradient runs in stage {stage}, it has no backward")
        return passes_s[microbatch]

    def stage_of(self, action: Action) -> Stage:
        """Return the stage of an action; ValueError where it has none."""
        if action.stage is None:
            raise ValueError(f"action {action} belongs to no stage")
        return self._plan.stage[action.stage]

    def _passes_like(self, stage: Stage, kind: Pass) -> list[float]:
        """Return `_passes_of_stage`, once for stages of a replica that hold equal layers on equal ranks."""
        unit = self._units.get(stage.id)
        sharding = None if unit is None else self._sharding_of(unit)
        key = self._stage_kind[stage.id], stage.replica, kind, self._routing.backwards(stage), sharding
        if key not in self._passes_of_kind:
            self._passes_of_kind[key] = self._passes_of_stage(stage, kind)
        return self._passes_of_kind[key]

    def _sharding_of(self, unit: ShardUnit) -> int:
        """Return a number, equal for units that gather and scatter equal weights among the same ranks."""
        if id(unit) not in self._unit_kind:  # the plan keeps its units alive
            shape = unit.holders, unit.expert_holders, unit.trained, unit.frozen
            self._unit_kind[id(unit)] = self._kind(shape)
        return self._unit_kind[id(unit)]

    def _passes_of_stage(self, stage: Stage, kind: Pass) -> list[float]:
        """[microbatches] seconds of a kind of pass; NaN where the stage has no such pass."""
        profile, measured = self._cost_on[stage.id].profile, measured_as(kind)
        overhead_s, factor = profile.overhead_s(measured), pace(self._plan, stage, profile, measured)
        microbatches = self._plan.microbatches_of.get((stage.module, stage.replica), ())
        seconds_of: dict[tuple[int, tuple[Pass, ...]], float] = {}
        seconds = []
        backwards = self._routing.backwards(stage)
        beside = self._rounds_beside(stage, kind, backwards)
        of_each = zip(microbatches, self._microbatch_kinds_of(stage), backwards, beside, strict=True)
        for microbatch, microbatch_kind, has_backward, rounds in of_each:
            if kind is not Pass.F and not has_backward:
                seconds.append(nan)
                continue
            key = microbatch_kind, rounds
            if key not in seconds_of:
                times = self._times(stage, microbatch, microbatch_kind)
                lost_s = self._lost_s(stage, rounds, times.of(kind))
                seconds_of[key] = overhead_s + factor * (times.of(kind) + lost_s)
            seconds.append(seconds_of[key])
        return seconds

    def _microbatch_kinds_of(self, stage: Stage) -> list[int]:
        """[microbatches of the replica] number of the kind that decides the times of its passes."""
        module_replica = stage.module, stage.replica
        if module_replica not in self._microbatch_kinds:
            self._microbatch_kinds[module_replica] = list(map(self._kind, self._shapes_of(stage)))
        return self._microbatch_kinds[module_replica]

    def _shapes_of(self, stage: Stage) -> list[tuple[object, ...]]:
        """[microbatches of the replica] shapes, shared by plans with equal microbatches on equal grids."""
        plan, module_replica = self._plan, (stage.module, stage.replica)

        def derive() -> list[tuple[object, ...]]:
            return list(map(self._shape_of, plan.microbatches_of.get(module_replica, ())))

        if self._works is not works_of or (self._attention is not None and self._attention_identity is None):
            return derive()
        grid = stage.joint_replicas, stage.cp, stage.tp, stage.ep
        of_plan = Identity(plan.model), Identity(plan.batch), value_key(plan.microbatches)
        key = *of_plan, value_key(plan.token_shards), module_replica, grid, self._attention is None
        return _SHAPES.get_or(key, derive)

    def _shape_of(self, microbatch: Microbatch) -> tuple[object, ...]:
        """Return a key of what decides the times of a microbatch's passes."""
        shape = self._works(self._plan, microbatch), self._routing.present(microbatch)
        if self._attention is None:
            return shape
        if self._attention_identity is None:  # times may differ between microbatches of equal rows
            return *shape, microbatch.index, microbatch.replica
        return *shape, row_kinds(self._plan, microbatch), self._owners(microbatch)

    def _times(self, stage: Stage, microbatch: Microbatch, microbatch_kind: int) -> PassTimes:
        key = self._stage_kind[stage.id], microbatch_kind
        if key not in self._times_of_kind:
            self._times_of_kind[key] = self._cached_times(stage, microbatch)
            self._unmeasured |= self._times_of_kind[key].unmeasured
        return self._times_of_kind[key]

    def round_s(self, action: Action) -> float:
        """Return the seconds of an all-gather of weights or reduce-scatter of gradients, tensor by tensor.

        Groups of ranks with different weights exchange them at the same time; the slowest counts.
        """
        unit = unit_of(self._units, action)
        key = unit.stages[0], action.kind
        if key not in self._rounds_s:
            settings = self._plan.settings
            if action.kind is Pass.ALL_GATHER:
                tensors, element = unit.gathered, settings.precision.num_bytes
            else:
                tensors, element = unit.scattered, settings.gradient_bytes
            self._rounds_s[key] = float_sum(
                max(
                    self._collectives.round_s(action.kind, flat.num_elements * element, ranks)
                    for ranks in unit.groups(experts=flat.experts)
                )
                for flat in tensors
            )
            if action.kind is Pass.REDUCE_SCATTER:
                self._rounds_s[key] += self._partial_s(self._plan.stage[unit.stages[0]])
        return self._rounds_s[key]

    def _partial_s(self, stage: Stage) -> float:
        """Return the seconds of summing a sharded stage's replicated weights over ranks of one row."""
        parameters = [each for own in partial_weights(self._plan, stage).values() for each in own]
        return self._collectives.partial_s(parameters, stage.ranks[0]) if parameters else 0.0

    def _rounds_beside(self, stage: Stage, kind: Pass, backwards: Sequence[bool]) -> list[tuple[Pass, ...]]:
        """[microbatches] collectives of sharded weights that run beside a pass.

        Those of its own round approximate its neighbours'. The first microbatch opens a step's only round,
        the last one with a backward ends it.
        """
        unit, count = self._units.get(stage.id), len(backwards)
        if unit is None:
            return [()] * count
        settings = self._plan.settings.of(stage.module)
        once, each_pass = settings.is_gathered_once, settings.reshard_after is ReshardAfter.PASS
        gathering = (Pass.ALL_GATHER,) * (kind is Pass.F or each_pass)
        scattering = (Pass.REDUCE_SCATTER,) * bool(kind is Pass.B and unit.trained)
        if not once:
            return [gathering + scattering] * count
        last = max((index for index, has_backward in enumerate(backwards) if has_backward), default=-1)
        return [gathering * (index == 0) + scattering * (index >= last) for index in range(count)]

    def _lost_s(self, stage: Stage, beside: Sequence[Pass], pass_s: float) -> float:
        """Return the seconds that a pass with sharded weights loses to the collectives beside it."""
        if not beside:
            return 0.0
        concurrent_s = float_sum(self.round_s(Action(stage.id, kind, 0)) for kind in beside)
        busy_s = concurrent_s * busy_share(self._collectives.link(self._units[stage.id].ranks))
        return self._slowed_s(busy_s, pass_s)

    def _cached_times(self, stage: Stage, microbatch: Microbatch) -> PassTimes:
        if self._attention_identity is None:
            return self._stage_times(stage, microbatch)
        plan, settings, of_module = self._plan, self._plan.settings, self._plan.settings.of(stage.module)
        needs = self._routing.flow(microbatch).needs[stage.module][slice(*stage.layers)]
        degrees = stage.joint_replicas, stage.tp, stage.cp, stage.ep
        grid = stage.module, contents(plan, stage), needs, degrees, self._links[stage.id]
        key = (
            (Identity(self._cost_on[stage.id]), Identity(plan.model), grid),
            (settings.precision, settings.kernels.cuts_sequence, of_module.sequence_parallel),
            (of_module.computed_again, of_module.key_exchange),
            (self._works(plan, microbatch), self._routing.present(microbatch)),
            () if self._attention is None else self._attention_key(stage, microbatch),
        )
        return _STAGE_TIMES.get_or(key, lambda: self._stage_times(stage, microbatch))

    def _stage_times(self, stage: Stage, microbatch: Microbatch) -> PassTimes:
        needs = self._routing.flow(microbatch).needs[stage.module][slice(*stage.layers)]
        times = self._layer_times(stage, microbatch, self._links[stage.id])
        settings = self._plan.settings.of(stage.module)
        recomputed_s = self._recomputed_s(stage, microbatch, self._links[stage.id], settings.computed_again)
        return pass_times(times, needs, recomputed_in(self._plan, stage), recomputed_s)

    def _recomputed_s(
        self, stage: Stage, microbatch: Microbatch, links: GridLinks, modules: Collection[BlockModule]
    ) -> tuple[float, ...]:
        """[layers] seconds of the modules that a backward computes again; empty: none."""
        if not modules:
            return ()
        layers, cost = self._plan.model.module(stage.module).layers, self._cost_on[stage.id]
        borders, seconds = token_borders(self._plan, stage), []
        for index in range(*stage.layers):
            part = part_of(layers[index], modules)
            machine = dividing(cost, self._plan.settings, stage.module) if index in borders.divided else cost
            time = None if part is None else self._layer_time(part, stage, microbatch, links, machine)
            seconds.append(0.0 if time is None else time.forward_s)
        return tuple(seconds)

    def _shape(self, stage: Stage) -> tuple[object, ...]:
        """Return a key that is equal for stages whose passes take equal times."""
        if self._attention is not None and self._attention_identity is None:
            return self._grid_of(stage, (stage.layers, stage.ranks))
        joined = None if self._attention is None else neighbour_link(self._plan.cluster, stage)
        layers = contents_and_needs(self._routing, stage)
        return self._grid_of(stage, (*layers, stage.tp, stage.cp, joined))

    def _attention_key(self, stage: Stage, microbatch: Microbatch) -> tuple[object, ...]:
        """Return a key of what else decides attention times: rows, token owners, and the neighbours' link."""
        rows, link = row_kinds(self._plan, microbatch), neighbour_link(self._plan.cluster, stage)
        return self._attention_identity, Identity(self._plan.batch), rows, self._owners(microbatch), link

    def _owners(self, microbatch: Microbatch) -> tuple[object, ...]:
        """[rows] token owners of each; None: zigzag. Empty: the plan has no token shards."""
        if not self._plan.token_shards:
            return ()
        where = microbatch.module, microbatch.replica, microbatch.index
        shards = (self._plan.token_shard.get((*where, row)) for row in range(len(microbatch.rows)))
        return tuple(None if shard is None else (shard.block_tokens, shard.owners) for shard in shards)

    def _grid_of(self, stage: Stage, grid: tuple[object, ...]) -> tuple[object, ...]:
        links, device = self._links[stage.id], self._cost_on[stage.id].profile.device
        return stage.module, grid, stage.joint_replicas, stage.ep, links, device

    def _kind(self, shape: tuple[object, ...]) -> int:
        """Return a number, equal for equal shapes."""
        return self._kinds.setdefault(shape, len(self._kinds))

    def _layer_times(self, stage: Stage, microbatch: Microbatch, links: GridLinks) -> list[LayerTime]:
        layers = self._plan.model.module(stage.module).layers
        cost, borders = self._cost_on[stage.id], token_borders(self._plan, stage)
        divided = dividing(cost, self._plan.settings, stage.module)
        times: list[LayerTime] = []
        time_of: dict[tuple[object, ...], LayerTime] = {}  # equal blocks of a model share their operators
        for index in range(*stage.layers):
            layer, is_divided = layers[index], index in borders.divided
            gathers, joins = is_divided and index in borders.divides, is_divided and index in borders.joins
            key = id(layer.operators), layer.kind, layer.out_width, layer.emits, is_divided, gathers, joins
            if key not in time_of:
                time = self._layer_time(layer, stage, microbatch, links, divided if is_divided else cost)
                if is_divided:
                    gather_s = self._gather_s(layer, stage, microbatch, links) if gathers else 0.0
                    join_s = self._gather_s(layer, stage, microbatch, links) if joins else 0.0
                    time = with_gathers(time, join_s, gather_s, self._unmeasured_gathers(stage, links))
                time_of[key] = time
            times.append(time_of[key])
        return times

    def _gather_s(self, layer: Layer, stage: Stage, microbatch: Microbatch, links: GridLinks) -> float:
        """Return the seconds of an all-gather of a layer's tokens over tensor-parallel ranks."""
        assert links.tensor is not None, "only several ranks divide tokens"
        works = self._works(self._plan, microbatch)
        size = self._plan.settings.precision.num_bytes
        num_tokens = max(work.tokens(TokenCount.IN) for work in works)
        num_bytes = num_tokens / stage.cp * layer.out_width * size
        cost = self._cost_on[stage.id]
        seconds = cost.collectives.seconds(Collective.ALL_GATHER, num_bytes, stage.tp, links.tensor)
        return seconds / cost.execution.collective_rate

    def _unmeasured_gathers(self, stage: Stage, links: GridLinks) -> frozenset[str]:
        known = self._cost_on[stage.id].collectives
        basis = "" if links.tensor is None else known.basis(Collective.ALL_GATHER, stage.tp, links.tensor)
        return frozenset({f"collectives inside a layer: {basis}"} if basis else ())

    def _layer_time(
        self, layer: Layer, stage: Stage, microbatch: Microbatch, links: GridLinks, cost: CostModel
    ) -> LayerTime:
        attention_times: Times = {}
        if self._attention is not None:
            attention_times = times_of(self._attention, self._plan, stage, microbatch, layer)
        remaining = without_attention(layer, attention_times)
        machine = cost.with_expert_parallel(stage.ep, links.experts)
        grid = GridCost(machine, stage.tp, stage.cp, self._plan.settings.precision, links)
        times = [grid.layer_time(remaining, work) for work in self._works(self._plan, microbatch)]
        return with_attention(slowest(times), layer, attention_times)

    def _stage_cost(self, stage: Stage) -> CostModel:
        """Return the stage's machine, with its format of products, and sums in `collective_pieces` pieces."""
        settings = self._plan.settings
        cost, num_pieces = self._cost_of(stage.flat_ranks), settings.of(stage.module).collective_pieces
        return multiplying(cost, settings, stage.module).summing_in(1 if stage.tp == 1 else num_pieces)
