"""Seconds of the passes of a plan's stages over their microbatches, by what these have in common."""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from math import isnan, nan

from workbench.cost.collectives import Collective
from workbench.cost.group_link import busy_share
from workbench.cost.hardware import Cluster
from workbench.cost.layer_time import slowest
from workbench.cost.model import CostModel, LayerTime, Work
from workbench.cost.overlapped_collectives import loss_on
from workbench.model.block_modules import BlockModule, part_of
from workbench.model.layer import Layer, TokenCount
from workbench.plan.contents import contents
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.parameter_shards import sharded_stages, unit_of
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.plan.routing import routing_of
from workbench.plan.sequence import dividing, token_borders
from workbench.plan.work import row_kinds, works_of
from workbench.schedule.action import Action, Pass, measured_as
from workbench.timing.attention import (
    AttentionModel,
    Times,
    identity_of,
    times_of,
    with_attention,
    without_attention,
)
from workbench.timing.grid_links import GridLinks, grid_links, neighbour_link
from workbench.timing.pass_times import PassTimes, pace, pass_times, with_gathers
from workbench.timing.weights import CollectivePrices

Works = Callable[[Plan, Microbatch], tuple[Work, ...]]
"""Of a microbatch, on each context-parallel rank that may be the slowest."""

_STAGE_TIMES: LruCache[PassTimes] = LruCache(65_536)


def machines(cost: CostModel, cluster: Cluster) -> Callable[[Sequence[int]], CostModel]:
    """The machine that ranks are; ValueError where they are of several kinds. Not a method: no cycle."""

    @cache
    def of(ranks: tuple[int, ...]) -> CostModel:
        return cost.on(cluster.device_of(ranks))

    return lambda ranks: of(tuple(ranks))


class PassPrices:
    """Prices of passes; a plan needs no programs for them.

    Args:
        plan: its stages, microbatches and settings.
        cost_of: the machine that some ranks are.
        attention: as `price` has it.
        works: who does how much, see `works_of`.
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
        self._known: dict[tuple[int, int], PassTimes] = {}
        self._cost_on = {stage.id: self._stage_cost(stage) for stage in plan.stages}
        self._links = {stage.id: grid_links(plan.cluster, stage) for stage in plan.stages}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._stage_kind = {stage.id: self._kind(self._shape(stage)) for stage in plan.stages}
        self._microbatch_kinds: dict[tuple[str, int], list[int]] = {}
        self._rounds_s: dict[tuple[int, Pass], float] = {}  # of a unit, whichever replica asks
        self._passes_s: dict[tuple[int | None, Pass], list[float]] = {}  # by stage and kind
        self._unmeasured: set[str] = set()

    @property
    def unmeasured(self) -> set[str]:
        """What went into prices that was not measured."""
        return self._unmeasured | self._collectives.unmeasured

    def duration_s(self, action: Action) -> float:
        """Seconds of a pass on its slowest rank.

        Raises:
            ValueError: one without a microbatch, or a backward of a stage in which no gradient runs.

        Complexity: O(1), and once for its stage and kind O(microbatches).
        """
        number, kind, at = action
        passes_s = self._passes_s.get((number, kind))
        if passes_s is None:
            passes_s = self._passes_s[number, kind] = self._of_stage(self._stage_of(action), kind)
        if at is None or not 0 <= at < len(passes_s):
            module = self._stage_of(action).module
            raise ValueError(f"action {action}: {module!r} has no microbatch {action.microbatch}")
        if isnan(passes_s[at]):
            raise ValueError(f"action {action}: no gradient runs in stage {number}, it has no backward")
        return passes_s[at]

    def _stage_of(self, action: Action) -> Stage:
        if action.stage is None:
            raise ValueError(f"action {action} belongs to no stage")
        return self._plan.stage[action.stage]

    def _of_stage(self, stage: Stage, kind: Pass) -> list[float]:
        """[microbatches] seconds of a kind of pass; not a number where the stage has none of it."""
        profile, measured = self._cost_on[stage.id].profile, measured_as(kind)
        overhead_s, factor = profile.overhead_s(measured), pace(self._plan, stage, profile, measured)
        microbatches = self._plan.microbatches_of.get((stage.module, stage.replica), ())
        known: dict[int, float] = {}
        found = []
        for microbatch, of_kind, has in zip(
            microbatches, self._kinds_in(stage), self._routing.backwards(stage), strict=True
        ):
            if kind is not Pass.F and not has:
                found.append(nan)
                continue
            if of_kind not in known:
                times = self._times(stage, microbatch, of_kind)
                known[of_kind] = overhead_s + factor * (times.of(kind) + self._lost_s(stage, kind, times))
            found.append(known[of_kind])
        return found

    def _kinds_in(self, stage: Stage) -> list[int]:
        """[microbatches of the replica] a number for all that the times of its passes follow from."""
        place = stage.module, stage.replica
        if place not in self._microbatch_kinds:
            held = self._plan.microbatches_of.get(place, ())
            self._microbatch_kinds[place] = [self._kind(self._shape_of(each)) for each in held]
        return self._microbatch_kinds[place]

    def _shape_of(self, microbatch: Microbatch) -> tuple[object, ...]:
        shape = self._works(self._plan, microbatch), self._routing.present(microbatch)
        if self._attention is None:
            return shape
        if self._attention_identity is None:  # may tell apart microbatches of equal rows
            return *shape, microbatch.index, microbatch.replica
        return *shape, row_kinds(self._plan, microbatch), self._owners(microbatch)

    def _times(self, stage: Stage, microbatch: Microbatch, of_kind: int) -> PassTimes:
        key = self._stage_kind[stage.id], of_kind
        if key not in self._known:
            self._known[key] = self._remembered_times(stage, microbatch)
            self._unmeasured |= self._known[key].unmeasured
        return self._known[key]

    def round_s(self, action: Action) -> float:
        """All-gather of sharded weights or reduce-scatter of their gradients, tensor after tensor."""
        unit = unit_of(self._units, action)
        key = unit.stages[0], action.kind
        if key not in self._rounds_s:
            settings = self._plan.settings
            if action.kind is Pass.ALL_GATHER:
                sizes, element = unit.gathered, settings.precision.num_bytes
            else:
                sizes, element = unit.trained, settings.gradient_bytes
            each_s = (self._collectives.round_s(action.kind, size * element, unit.ranks) for size in sizes)
            self._rounds_s[key] = sum(each_s)
        return self._rounds_s[key]

    def _lost_s(self, stage: Stage, kind: Pass, times: PassTimes) -> float:
        """What a pass between sharded weights loses to the rounds beside it, its own for its neighbours'."""
        if stage.id not in self._units:
            return 0.0
        beside_s = self.round_s(Action(stage.id, Pass.ALL_GATHER, 0))
        if kind is Pass.B and self._units[stage.id].trained:
            beside_s += self.round_s(Action(stage.id, Pass.REDUCE_SCATTER, 0))
        busy_s = beside_s * busy_share(self._collectives.link(self._units[stage.id].ranks))
        return self._slowed_s(busy_s, times.of(kind))

    def _remembered_times(self, stage: Stage, microbatch: Microbatch) -> PassTimes:
        if self._attention_identity is None:
            return self._stage_times(stage, microbatch)
        plan, settings, own = self._plan, self._plan.settings, self._plan.settings.of(stage.module)
        needs = self._routing.flow(microbatch).needs[stage.module][slice(*stage.layers)]
        grid = stage.module, contents(plan, stage), needs, stage.tp, stage.cp, stage.ep, self._links[stage.id]
        key = (
            (Identity(self._cost_on[stage.id]), Identity(plan.model), grid),
            (settings.precision, settings.kernels.cuts_sequence, own.sequence_parallel),
            (own.recompute, own.computed_again, own.key_exchange),
            (self._works(plan, microbatch), self._routing.present(microbatch)),
            () if self._attention is None else self._tokens(stage, microbatch),
        )
        return _STAGE_TIMES.get_or(key, lambda: self._stage_times(stage, microbatch))

    def _stage_times(self, stage: Stage, microbatch: Microbatch) -> PassTimes:
        needs = self._routing.flow(microbatch).needs[stage.module][slice(*stage.layers)]
        times = self._layer_times(stage, microbatch, self._links[stage.id])
        settings = self._plan.settings.of(stage.module)
        again = self._again(stage, microbatch, self._links[stage.id], settings.computed_again)
        return pass_times(times, needs, settings.recompute, again)

    def _again(
        self, stage: Stage, microbatch: Microbatch, links: GridLinks, modules: Collection[BlockModule]
    ) -> tuple[float, ...]:
        """[layers] seconds of what a backward computes again of each; none: of none."""
        if not modules:
            return ()
        layers, cost = self._plan.model.module(stage.module).layers, self._cost_on[stage.id]
        borders, found = token_borders(self._plan, stage), []
        for index in range(*stage.layers):
            part = part_of(layers[index], modules)
            machine = dividing(cost, self._plan.settings, stage.module) if index in borders.divided else cost
            time = None if part is None else self._layer_time(part, stage, microbatch, links, machine)
            found.append(0.0 if time is None else time.forward_s)
        return tuple(found)

    def _shape(self, stage: Stage) -> tuple[object, ...]:
        """What stages of the plan share whose passes take equal times."""
        if self._attention is not None and self._attention_identity is None:
            return self._grid_of(stage, stage.ranks)
        joined = None if self._attention is None else neighbour_link(self._plan.cluster, stage)
        return self._grid_of(stage, (stage.tp, stage.cp, joined))

    def _tokens(self, stage: Stage, microbatch: Microbatch) -> tuple[object, ...]:
        """What decides times of attention besides: whose tokens, who owns them, and what joins neighbours."""
        rows, link = row_kinds(self._plan, microbatch), neighbour_link(self._plan.cluster, stage)
        return self._attention_identity, Identity(self._plan.batch), rows, self._owners(microbatch), link

    def _owners(self, microbatch: Microbatch) -> tuple[object, ...]:
        """[rows] who owns the tokens of each; None: zigzag's owners. Empty: no row of the plan has others."""
        if not self._plan.token_shards:
            return ()
        where = microbatch.module, microbatch.replica, microbatch.index
        shards = (self._plan.token_shard.get((*where, row)) for row in range(len(microbatch.rows)))
        return tuple(None if shard is None else (shard.block_tokens, shard.owners) for shard in shards)

    def _grid_of(self, stage: Stage, grid: tuple[object, ...]) -> tuple[object, ...]:
        links, device = self._links[stage.id], self._cost_on[stage.id].profile.device
        return stage.module, stage.layers, grid, stage.ep, links, device

    def _kind(self, shape: tuple[object, ...]) -> int:
        """A number for what is equal."""
        return self._kinds.setdefault(shape, len(self._kinds))

    def _layer_times(self, stage: Stage, microbatch: Microbatch, links: GridLinks) -> list[LayerTime]:
        layers = self._plan.model.module(stage.module).layers
        cost, borders = self._cost_on[stage.id], token_borders(self._plan, stage)
        divided = dividing(cost, self._plan.settings, stage.module)
        found: list[LayerTime] = []
        known: dict[tuple[object, ...], LayerTime] = {}  # equal blocks of a model share their operators
        for index in range(*stage.layers):
            layer, is_divided = layers[index], index in borders.divided
            starts, ends = is_divided and index in borders.divides, is_divided and index in borders.joins
            key = id(layer.operators), layer.kind, layer.out_width, layer.emits, is_divided, starts, ends
            if key not in known:
                time = self._layer_time(layer, stage, microbatch, links, divided if is_divided else cost)
                if is_divided:
                    gather_s = self._gather_s(layer, stage, microbatch, links) if starts else 0.0
                    join_s = self._gather_s(layer, stage, microbatch, links) if ends else 0.0
                    time = with_gathers(time, join_s, gather_s, self._unmeasured_gathers(stage, links))
                known[key] = time
            found.append(known[key])
        return found

    def _gather_s(self, layer: Layer, stage: Stage, microbatch: Microbatch, links: GridLinks) -> float:
        """All tokens of a layer's input or output brought to every tensor-parallel rank."""
        assert links.tensor is not None, "only several ranks divide tokens"
        works = self._works(self._plan, microbatch)
        size = self._plan.settings.precision.num_bytes
        num_tokens = max(work.tokens(TokenCount.IN) for work in works)
        num_bytes = num_tokens / stage.cp * layer.out_width * size
        cost = self._cost_on[stage.id]
        seconds = cost.collectives.seconds(Collective.ALL_GATHER, num_bytes, stage.tp, links.tensor)
        return seconds / cost.execution.collective_rate

    def _unmeasured_gathers(self, stage: Stage, links: GridLinks) -> frozenset[str]:
        measured = self._cost_on[stage.id].collectives
        if links.tensor is None or measured.is_measured(Collective.ALL_GATHER, stage.tp, links.tensor):
            return frozenset()
        return frozenset(("collectives inside a layer: ring formula",))

    def _layer_time(
        self, layer: Layer, stage: Stage, microbatch: Microbatch, links: GridLinks, cost: CostModel
    ) -> LayerTime:
        given: Times = {}
        if self._attention is not None:
            given = times_of(self._attention, self._plan, stage, microbatch, layer)
        rest, machine = without_attention(layer, given), cost.with_expert_parallel(stage.ep, links.experts)
        times = [
            machine.layer_time(
                rest,
                work,
                tp=stage.tp,
                cp=stage.cp,
                precision=self._plan.settings.precision,
                link=links.tensor,
                context_link=links.context,
            )
            for work in self._works(self._plan, microbatch)
        ]
        return with_attention(slowest(times), layer, given)

    def _stage_cost(self, stage: Stage) -> CostModel:
        """The stage's machine, with tensor-parallel sums in as many pieces as its module's settings say."""
        num_pieces = self._plan.settings.of(stage.module).collective_pieces
        return self._cost_of(stage.flat_ranks).summing_in(1 if stage.tp == 1 else num_pieces)
