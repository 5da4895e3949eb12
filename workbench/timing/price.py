"""Seconds of every action of a lowered plan on the machine of one cost model."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

from workbench.collector import collector_paused
from workbench.cost.collectives import Collective
from workbench.cost.group_link import busy_share
from workbench.cost.hardware import Cluster
from workbench.cost.layer_time import slowest
from workbench.cost.model import CostModel, LayerTime, Work
from workbench.cost.overlapped_collectives import loss_on
from workbench.memory.stage import GRADIENTS, state_of
from workbench.model.block_modules import BlockModule, part_of
from workbench.model.layer import Layer, TokenCount
from workbench.plan.contents import contents
from workbench.plan.lowered import Lowered
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.parameter_shards import sharded_stages, unit_of
from workbench.plan.plan import Microbatch, Precision, Settings, Stage
from workbench.plan.routing import routing_of
from workbench.plan.sequence import dividing, token_borders
from workbench.plan.work import works_of
from workbench.schedule.action import MEANING, Action, Activity, Pass, TaskKind, measured_as
from workbench.timing.alike_actions import alike_actions
from workbench.timing.attention import (
    AttentionModel,
    Times,
    identity_of,
    times_of,
    with_attention,
    without_attention,
)
from workbench.timing.grid_links import GridLinks, grid_links
from workbench.timing.key_exchange import with_key_exchange
from workbench.timing.pass_times import PassTimes, pace, pass_times, with_gathers
from workbench.timing.weights import WeightPrices
from workbench.units import GB

HOST_BYTES_PER_S = 25 * GB  # PCIe 4.0 x16 has 31.5 GB/s on the wire; copies from pinned memory reach 25


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds by action, of the STEP by rank, and what went into them that was not measured."""

    durations_s: dict[Action, float]
    steps_s: dict[int, float]
    unmeasured: tuple[str, ...]

    def duration_s(self, action: Action) -> float:
        """Seconds of one action, that of its slowest rank; ValueError when it is not in the plan. O(1)."""
        found = self.durations_s.get(action)
        if found is None:
            raise ValueError(f"action {action} has no price: it stands in no program of the plan")
        return found

    def step_s(self, rank: int) -> float:
        """Seconds of the STEP of one rank."""
        return self.steps_s[rank]


_STAGE_TIMES: LruCache[PassTimes] = LruCache(65_536)


@collector_paused()
def price(lowered: Lowered, cost: CostModel, *, attention: AttentionModel | None = None) -> Price:
    """Price every action that stands in a program.

    Passes are sums over the stage's layers by the exact frozen rule for the modules present
    in the microbatch; a sum of gradients is its groups' all-reduces one after the other, a collective
    of sharded weights one of the unit for each of its tensors; STEP is each rank's own optimizer update,
    and what is said about weights then. Each is as many times longer as was measured in a pipeline, and
    each action also takes the executor's measured overhead; copies to and from the host only that.

    Args:
        attention: times of attentions that follow from masks, token shards and a kernel's
            balance; None, or where it gives None: the cost model's, by query-key pairs.

    Raises:
        ValueError: a backward of a stage in which no gradient runs.

    Complexity: O(actions) plus one pricing of each distinct (layers, work, gradients).
    """
    pricing = _Pricing(lowered, cost, with_key_exchange(attention, lowered.plan, cost))
    alike = alike_actions(lowered.plan, by_tokens=pricing.is_by_tokens)
    firsts_s = [pricing.duration_s(action) for action in alike.firsts]
    durations_s = {action: firsts_s[index] for action, index in alike.place.items()}
    return Price(durations_s, pricing.steps_s, tuple(sorted(pricing.all_unmeasured())))


def _machines(cost: CostModel, cluster: Cluster) -> Callable[[Sequence[int]], CostModel]:
    """The machine that ranks are; ValueError where they are of several kinds. Not a method: no cycle."""

    @cache
    def of(ranks: tuple[int, ...]) -> CostModel:
        return cost.on(cluster.device_of(ranks))

    return lambda ranks: of(tuple(ranks))


class _Pricing:
    def __init__(self, lowered: Lowered, cost: CostModel, attention: AttentionModel | None) -> None:
        self._lowered, self._cost, self._plan = lowered, cost, lowered.plan
        self._attention, self._attention_identity = attention, identity_of(attention)
        self._routing = routing_of(self._plan)
        self._units = sharded_stages(self._plan)
        self._slowed_s = loss_on(self._plan.cluster)
        self._microbatch = {(m.module, m.replica, m.index): m for m in self._plan.microbatches}
        self._works: dict[tuple[str, int, int], tuple[Work, ...]] = {}
        self._known: dict[tuple[int, int], PassTimes] = {}
        self._cost_of = _machines(cost, self._plan.cluster)
        self._cost_on = {stage.id: self._stage_cost(stage) for stage in self._plan.stages}
        self._links = {stage.id: grid_links(self._plan.cluster, stage) for stage in self._plan.stages}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._stage_kind = {stage.id: self._kind(self._shape(stage)) for stage in self._plan.stages}
        self._microbatch_kind: dict[tuple[str, int, int], int] = {}
        self._rounds_s: dict[tuple[int, Pass], float] = {}  # of a unit, whichever replica asks
        self._weights = WeightPrices(lowered, self._cost_of)
        self.unmeasured: set[str] = set()
        if not cost.profile.overheads_s:
            self.unmeasured.add("executor overhead per action: taken as 0")
        self.steps_s = self._steps()

    @property
    def is_by_tokens(self) -> bool:
        """Whether passes over microbatches of equal work may take unequal times."""
        return self._attention is not None

    def all_unmeasured(self) -> set[str]:
        return self.unmeasured | self._weights.unmeasured

    def duration_s(self, action: Action) -> float:
        meaning = MEANING[action.kind]
        if meaning.activity is Activity.UPDATE:
            return max(self.steps_s.values())
        if meaning.activity is Activity.RELEASE:
            return 0.0
        stage = self._plan.stage[_stage_of(action)]
        profile, measured = self._cost_on[stage.id].profile, measured_as(action.kind)
        overhead_s = profile.overhead_s(measured)
        if meaning.activity is Activity.COPY:
            return overhead_s + self._move_s(stage)
        if meaning.activity is Activity.COMPUTE:
            return overhead_s + pace(self._plan, stage, profile, measured) * self._pass_s(action, stage)
        if meaning.task is TaskKind.FSDP:
            return overhead_s + self._round_s(action)
        factor = profile.pipeline_factor(measured)
        return overhead_s + factor * self._weights.reduce_s(action, stage.flat_ranks)

    def _pass_s(self, action: Action, stage: Stage) -> float:
        microbatch = self._microbatch[stage.module, stage.replica, action.microbatch or 0]
        times = self._times(stage, microbatch)
        return times.of(action.kind) + self._lost_s(stage, action.kind, times)

    def _lost_s(self, stage: Stage, kind: Pass, times: PassTimes) -> float:
        """What a pass between sharded weights loses to the rounds beside it, its own for its neighbours'."""
        if stage.id not in self._units:
            return 0.0
        beside_s = self._round_s(Action(stage.id, Pass.ALL_GATHER, 0))
        if kind is Pass.B and self._units[stage.id].trained:
            beside_s += self._round_s(Action(stage.id, Pass.REDUCE_SCATTER, 0))
        busy_s = beside_s * busy_share(self._weights.link(self._units[stage.id].ranks))
        return self._slowed_s(busy_s, times.of(kind))

    def _round_s(self, action: Action) -> float:
        """All-gather of sharded weights or reduce-scatter of their gradients, tensor after tensor."""
        unit = unit_of(self._units, action)
        key = unit.stages[0], action.kind
        if key not in self._rounds_s:
            settings = self._plan.settings
            if action.kind is Pass.ALL_GATHER:
                sizes, element = unit.gathered, settings.precision.num_bytes
            else:
                sizes, element = unit.trained, settings.gradient_bytes
            each_s = (self._weights.round_s(action.kind, size * element, unit.ranks) for size in sizes)
            self._rounds_s[key] = sum(each_s)
        return self._rounds_s[key]

    def _move_s(self, stage: Stage) -> float:
        """A copy of the stage's weights and optimizer state between the device and its host."""
        self.unmeasured.add(f"copies to and from the host: taken at {HOST_BYTES_PER_S / GB:g} GB/s")
        state = state_of(self._plan, stage.flat_ranks[0])
        moved = (size for held, kind, size in state if held.id == stage.id and kind.part != GRADIENTS)
        return sum(moved) / HOST_BYTES_PER_S

    def _times(self, stage: Stage, microbatch: Microbatch) -> PassTimes:
        name = (microbatch.module, microbatch.replica, microbatch.index)
        if name not in self._works:
            works = self._works[name] = works_of(self._plan, microbatch)
            shape: tuple[object, ...] = (works, self._routing.present(microbatch))
            if self._attention is not None:  # may tell apart microbatches of equal work
                shape = (*shape, name)
            self._microbatch_kind[name] = self._kind(shape)
        key = self._stage_kind[stage.id], self._microbatch_kind[name]
        if key not in self._known:
            self._known[key] = self._remembered_times(stage, microbatch)
            self.unmeasured |= self._known[key].unmeasured
        return self._known[key]

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
            (works_of(plan, microbatch), self._routing.present(microbatch)),
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
        return self._grid_of(stage, (stage.tp, stage.cp) if self._attention is None else stage.ranks)

    def _tokens(self, stage: Stage, microbatch: Microbatch) -> tuple[object, ...]:
        """What decides times of attention besides: whose tokens, who owns them, and what joins the owners."""
        plan = self._plan
        where = microbatch.module, microbatch.replica, microbatch.index
        shards = (plan.token_shard.get((*where, row)) for row in range(len(microbatch.rows)))
        owners = tuple(None if shard is None else (shard.block_tokens, shard.owners) for shard in shards)
        link = plan.cluster.joining(stage.flat_ranks)
        return self._attention_identity, Identity(plan.batch), microbatch.rows, owners, link

    def _grid_of(self, stage: Stage, grid: tuple[object, ...]) -> tuple[object, ...]:
        links, device = self._links[stage.id], self._cost_on[stage.id].profile.device
        return stage.module, stage.layers, grid, stage.ep, links, device

    def _kind(self, shape: tuple[object, ...]) -> int:
        """A number for what is equal: looked up for every action, where hashing the whole is slow."""
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
        works = self._works[microbatch.module, microbatch.replica, microbatch.index]
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
            for work in self._works[microbatch.module, microbatch.replica, microbatch.index]
        ]
        return with_attention(slowest(times), layer, given)

    def _steps(self) -> dict[int, float]:
        """The update of what each rank holds, and what its gradient groups say to each other then."""
        elements = dict.fromkeys(self._plan.ranks, 0.0)
        machines = {rank: self._cost_of((rank,)) for rank in elements}
        steps_s = {rank: cost.profile.overhead_s(Pass.STEP) for rank, cost in machines.items()}
        for group in self._lowered.groups:
            exchange_s = self._weights.step_s(group)
            updated = group.num_elements / optimizer_shards(self._plan, group).num_shards
            for rank in filter(elements.__contains__, group.ranks):  # others: replicas it stands for
                elements[rank] += updated
                steps_s[rank] += exchange_s
        return {
            rank: steps_s[rank]
            + cost.profile.pipeline_factor(Pass.STEP) * self._update_s(elements[rank], cost)
            for rank, cost in machines.items()
        }

    def _stage_cost(self, stage: Stage) -> CostModel:
        """The stage's machine, with tensor-parallel sums in as many pieces as its module's settings say."""
        num_pieces = self._plan.settings.of(stage.module).collective_pieces
        return self._cost_of(stage.flat_ranks).summing_in(1 if stage.tp == 1 else num_pieces)

    def _update_s(self, num_parameters: float, cost: CostModel) -> float:
        precision, wide = self._plan.settings.precision, self._plan.settings.optimizer_precision
        measured_s = dict(cost.profile.optimizer_s_per_parameter).get(precision)
        if measured_s is not None and wide in (None, precision):
            return num_parameters * measured_s
        self.unmeasured.add("optimizer step: bytes over memory bandwidth")
        return cost.update_s(num_parameters * step_bytes(precision, wide))


def least_update_s(num_parameters: float, cost: CostModel, settings: Settings) -> float:
    """Seconds that updates of so many parameters take together, on however many ranks, at least."""
    factor = cost.profile.pipeline_factor(Pass.STEP)
    precision, wide = settings.precision, settings.optimizer_precision
    measured_s = dict(cost.profile.optimizer_s_per_parameter).get(precision)
    if measured_s is not None and wide in (None, precision):
        return factor * num_parameters * measured_s
    return factor * cost.least_update_s(num_parameters * step_bytes(precision, wide))


def step_bytes(precision: Precision, wide: Precision | None = None) -> int:
    """Bytes AdamW moves per trainable parameter.

    float32 and float64: reads weight, gradient and two moments, writes all but the gradient.
    bfloat16: reads the gradient, a float32 master copy and two moments; writes those three
    and the weight (Rajbhandari et al. 2020, "ZeRO", section 3.1, mixed-precision Adam).
    A wide optimizer of narrower weights does the same with a gradient as wide as itself.
    """
    if wide is not None:
        return 7 * wide.num_bytes + (0 if wide is precision else precision.num_bytes)
    if precision is Precision.BFLOAT16:
        return 2 + 3 * 4 + 3 * 4 + 2
    return 7 * precision.num_bytes


def _stage_of(action: Action) -> int:
    if action.stage is None:
        raise ValueError(f"action {action} belongs to no stage")
    return action.stage
