"""How fast a plan is at best, and what its ranks hold at least, told from its stages before it is built."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.arrays import Flags
from workbench.cost.model import CostModel
from workbench.memory.sizes import Sizes
from workbench.memory.stage import GRADIENTS, state_of
from workbench.model.model_graph import Edge
from workbench.plan.optimizer_shards import state_shards
from workbench.plan.plan import KeyExchange, Plan, Stage
from workbench.plan.routing import Routing, routing_of
from workbench.planner.planner_cost import PlannerCost
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.timing.stage_seconds import PassSeconds, Seconds, StageSeconds
from workbench.units import gib

_Key = tuple[str, int]  # module and replica


class _Stage(NamedTuple):
    """[kinds] what a planner believes of a stage: `leaving_s` is of its backward what others wait for."""

    forward_s: Seconds
    backward_s: Seconds
    leaving_s: Seconds
    has_backward: Flags


class _StageChain(NamedTuple):
    """The stages of a replica in layer order, and [kinds] of microbatches that it has.

    By stage: `ahead_s` stands ahead of a forward, `behind_s` behind a backward, `after_s` behind a forward;
    `turn_s` lies between a forward and its backward, `depth` stages are ahead of it on the longest way out.
    """

    stages: tuple[Stage, ...]
    passes: tuple[_Stage, ...]
    counts: NDArray[np.int64]
    ahead_s: list[Seconds]
    behind_s: list[Seconds]
    after_s: list[Seconds]
    turn_s: list[Seconds]
    depth: list[int]

    @property
    def used(self) -> Flags:
        return self.counts > 0


class StageBounds:
    """Bounds on the plans of one draft, whatever stages it is given.

    Args:
        draft: with microbatches.
        cost: the machine, and others beside it.
        planner_cost: of the planner whose plans are bounded.
        schedule: of the plans.
    """

    def __init__(self, draft: Plan, cost: CostModel, planner_cost: PlannerCost, schedule: Schedule) -> None:
        self._seconds = StageSeconds(draft, cost)
        self._planner_cost, self._schedule = planner_cost, schedule
        self._is_aligned = _is_aligned(draft)
        self._held: dict[tuple[object, ...], int] = {}

    def seconds(self, plan: Plan) -> float:
        """Seconds that the planner believes no order of these stages' passes to beat.

        Ranks do all their passes; ahead of the first stands what its input comes from, behind the last
        what waits for its output; and a microbatch goes all the way. Messages take no time. Under 1F1B
        with the same microbatches everywhere, a stage that is alone on its ranks has a gap where its
        first backward comes later than its first forwards end, and one where its last forward
        comes back later than the backwards before it end.

        Raises:
            ValueError: a stage on ranks of several kinds.

        Complexity: O(stages x distinct microbatches), but for grids seen for the first time.
        """
        if any(stage.cp > 1 and _exchanges_otherwise(plan, stage) for stage in plan.stages):
            return 0.0  # another kernel's attention, which may be faster than the one summed up here
        read = {module.name: _is_read(plan, module.name) for module in plan.model.modules}
        chains = {key: self._chain(plan, key, read) for key in plan.chain}
        _Ways(plan, self._seconds, chains)
        has_gaps = self._has_gaps(plan)
        most_s = 0.0
        lines: dict[tuple[int, ...], list[tuple[float, float, float]]] = {}
        for chain in chains.values():
            if chain.used.any():
                most_s = max(most_s, self._path_s(chain))
                for stage, line in zip(chain.stages, self._lines(chain, has_gaps=has_gaps), strict=True):
                    lines.setdefault(tuple(sorted(stage.flat_ranks)), []).append(line)
        for held in lines.values():
            ahead, own, behind = zip(*held, strict=True)
            most_s = max(most_s, min(ahead) + sum(own) + min(behind))
        return most_s

    def check_memory(self, plan: Plan) -> None:
        """ValueError for stages that do not fit by what they hold at least.

        Complexity: O(ranks), but for stages seen for the first time.
        """
        if self._schedule.offload:
            return
        held: Counter[int] = Counter()
        routing = routing_of(plan)
        for rank in plan.ranks:
            index = plan.cluster.node_of(rank)
            node = plan.cluster.nodes[index]
            if node.num_cores is None:
                held[index] = 0
            held[index] += self.held_bytes(routing, rank)
            if held[index] > node.memory_bytes:
                raise ValueError(
                    f"rank {rank} does not fit: {gib(held[index]):.3g} GiB at least, but node {index} "
                    f"({node.device}) has {gib(node.memory_bytes):.3g} GiB; want recompute, sharding or more "
                    "stages"
                )

    def held_bytes(self, routing: Routing, rank: int) -> int:
        """What a rank holds at least: state in its STEP, or weights and microbatches in flight.

        Gradients count where some microbatch trains all of a stage; microbatches in flight are the forwards
        ahead of a stage's first backward under 1F1B.
        """
        plan = routing.plan
        stages = plan.stages_on[rank]
        ahead = tuple(self._forwards_ahead(routing, stage) for stage in stages)
        grids = tuple((s.module, s.layers, s.tp, s.cp, s.ep, len(plan.replicas(s.module))) for s in stages)
        key = ahead, grids, *(tuple(state_shards(plan, stage).values()) for stage in stages)
        if key not in self._held:
            trained = {stage.id for stage in stages if self._is_trained(plan, stage)}
            state = list(state_of(plan, rank))
            first = sum(num_bytes for _, kind, num_bytes in state if kind.part != GRADIENTS)
            last = sum(
                num_bytes
                for stage, kind, num_bytes in state
                if kind.part == GRADIENTS and stage.id in trained
            )
            kept = sum(self._kept_bytes(routing, s, num) for s, num in zip(stages, ahead, strict=True))
            self._held[key] = first + max(last, kept)
        return self._held[key]

    def _forwards_ahead(self, routing: Routing, stage: Stage) -> int:
        """Of its first backward, at least; 0 where that is not known, or there is no backward."""
        plan = routing.plan
        microbatches = plan.microbatches_of.get((stage.module, stage.replica), ())
        if self._schedule.kind is not ScheduleKind.ONE_F_ONE_B or not microbatches:
            return 0
        if not routing.has_backward(stage, microbatches[0]):
            return 0
        chain = plan.chain[stage.module, stage.replica]
        behind = len(chain) - 1 - chain.index(stage)
        edges = plan.model.edges_out_of(stage.module)
        if not edges:
            return min(behind + 1, len(microbatches))
        readers = [plan.chain[e.target, r] for e in edges for r in plan.replicas(e.target)]
        beyond = min(map(len, readers)) if all(edge.before_layer == 0 for edge in edges) else 0
        return min(behind + beyond, len(microbatches)) if self._is_aligned else 0

    def _kept_bytes(self, routing: Routing, stage: Stage, num_forwards: int) -> int:
        """Of so many forwards of a stage."""
        if num_forwards == 0:
            return 0
        sizes = Sizes(routing.plan, routing)
        microbatches = routing.plan.microbatches_of[stage.module, stage.replica]
        each = [
            size.kept - size.input_kept if routing.has_backward(stage, microbatch) else 0
            for microbatch in {self._seconds.kind_of(m): m for m in microbatches}.values()
            for size in [sizes.of(stage, microbatch, keeps=True)]
        ]
        return min(each) * num_forwards

    def _is_trained(self, plan: Plan, stage: Stage) -> bool:
        passes = self._seconds.passes(plan, stage)
        mine = [self._seconds.kind_of(m) for m in plan.microbatches_of.get((stage.module, stage.replica), ())]
        return _is_read(plan, stage.module) and bool(passes.trains_all[mine].any())

    def _chain(self, plan: Plan, key: _Key, read: dict[str, bool]) -> _StageChain:
        module, _ = key
        counts = np.zeros(len(self._seconds.kinds(module)), dtype=np.int64)
        for microbatch in plan.microbatches_of.get(key, ()):
            counts[self._seconds.kind_of(microbatch)] += 1
        stages = plan.chain[key]
        passes = (self._seconds.passes(plan, stage) for stage in stages)
        believed = tuple(self._believed(found, found.has_backward & read[module]) for found in passes)
        return _StageChain(stages, believed, counts, [], [], [], [], [])

    def _believed(self, found: PassSeconds, has: Flags) -> _Stage:
        if not self._schedule.kind.splits_backward:
            forward_s, backward_s = self._planner_cost.passes_s(found.forward_s, found.whole_s, has)
            return _Stage(forward_s, backward_s, backward_s, has)
        shorter_s = np.minimum(found.whole_s, found.through_s + found.weights_s)
        forward_s, backward_s = self._planner_cost.passes_s(found.forward_s, shorter_s, has)
        return _Stage(forward_s, backward_s, np.zeros_like(backward_s), has)

    def _has_gaps(self, plan: Plan) -> bool:
        """Whether under 1F1B every stage has ranks of its own, so that forwards ahead are stages behind."""
        if self._schedule.kind is not ScheduleKind.ONE_F_ONE_B or self._schedule.run_ahead:
            return False
        return self._is_aligned and all(len(held) == 1 for held in plan.stages_on.values())

    def _lines(self, chain: _StageChain, *, has_gaps: bool) -> Iterator[tuple[float, float, float]]:
        """Of every stage: what is ahead of its first pass, all of its passes, what is behind its last."""
        for index, passes in enumerate(chain.passes):
            last_s = np.where(passes.has_backward, chain.behind_s[index], chain.after_s[index])
            if self._schedule.kind.splits_backward:  # the last may be a W, for which nobody waits
                last_s = np.where(passes.has_backward, 0.0, last_s)
            own_s = float((passes.forward_s + passes.backward_s) @ chain.counts)
            if has_gaps and passes.has_backward[chain.used].all():
                own_s += _gaps_s(chain, index)
            ahead_s, behind_s = chain.ahead_s[index][chain.used], last_s[chain.used]
            yield float(ahead_s.min()), own_s, float(behind_s.min())

    def _path_s(self, chain: _StageChain) -> float:
        """The longest way of one microbatch."""
        whole_s = chain.ahead_s[0] + chain.passes[0].forward_s + chain.after_s[0]
        return float(whole_s[chain.used].max())


def _gaps_s(chain: _StageChain, place: int) -> float:
    """Of a stage under 1F1B: n forwards before its first backward, n backwards after its last forward."""
    passes, num = chain.passes[place], int(chain.counts.sum())
    between = min(chain.depth[place], num - 1)  # n - 1
    turn_s = float(chain.turn_s[place][chain.used].min())
    first_s = turn_s - between * float(passes.forward_s[chain.used].max())
    last_s = turn_s - between * float(passes.backward_s[chain.used].max())
    if between == num - 1:  # all forwards, then all backwards: one gap
        return max(0.0, first_s)
    return max(0.0, first_s) + max(0.0, last_s)


def _is_aligned(plan: Plan) -> bool:
    """Whether microbatches of one number have the same samples in all modules of a replica."""
    samples: dict[tuple[int, int], list[set[int]]] = {}
    for microbatch in plan.microbatches:
        held = {item.sample for item in microbatch.items}
        samples.setdefault((microbatch.replica, microbatch.index), []).append(held)
    modules = len(plan.model.modules)
    return all(len(held) == modules and all(each == held[0] for each in held) for held in samples.values())


def _exchanges_otherwise(plan: Plan, stage: Stage) -> bool:
    return plan.settings.of(stage.module).key_exchange is not KeyExchange.ALL_GATHER


def _is_read(plan: Plan, module: str) -> bool:
    """Whether every microbatch of a module is read: it has a loss, or the only copy of what others want."""
    if plan.model.module(module).has_loss:
        return True
    if not plan.model.edges_out_of(module):
        return False
    items = [item for m in plan.microbatches if m.module == module for item in m.items]
    return len(items) == len(set(items))


class _Ways:
    """What lies on the way to and from every stage, from module to module along the edges."""

    def __init__(self, plan: Plan, seconds: StageSeconds, chains: dict[_Key, _StageChain]) -> None:
        self._model, self._seconds, self._chains = plan.model, seconds, chains
        order = [module.name for module in plan.model.in_order]
        for module in order:
            for chain in self._of(module):
                self._add_ahead(module, chain)
                self._add_behind(module, chain)
        for module in reversed(order):
            for chain in self._of(module):
                self._add_after(module, chain)

    def _of(self, module: str) -> list[_StageChain]:
        return [chain for (name, _), chain in self._chains.items() if name == module]

    def _reading(self, edge: Edge) -> Flags:
        """[kinds] of the target's microbatches whether the source has items in them."""
        return np.array(
            [edge.source in kind.present for kind in self._seconds.kinds(edge.target)], dtype=bool
        )

    def _add_ahead(self, module: str, chain: _StageChain) -> None:
        ahead_s = np.zeros(len(chain.counts))
        for stage, passes in zip(chain.stages, chain.passes, strict=True):
            for edge in self._model.edges_into(module):
                if edge.entered_in(stage.layers):
                    arrives_s = np.where(self._reading(edge), self._least_ahead_s(edge), 0.0)
                    ahead_s = np.maximum(ahead_s, arrives_s)
            chain.ahead_s.append(ahead_s)
            ahead_s = ahead_s + passes.forward_s

    def _least_ahead_s(self, edge: Edge) -> float:
        """Until the first of the source's microbatches is there."""
        found = []
        for chain in self._of(edge.source):
            index = _place(chain, edge.after_layer)
            done_s = chain.ahead_s[index] + chain.passes[index].forward_s
            found += list(done_s[chain.used])
        return float(min(found, default=0.0))

    def _add_behind(self, module: str, chain: _StageChain) -> None:
        behind_s = np.zeros(len(chain.counts))
        for stage, passes in zip(chain.stages, chain.passes, strict=True):
            for edge in self._model.edges_into(module):
                if edge.entered_in(stage.layers):
                    returned_s = np.where(self._reading(edge), self._least_behind_s(edge), 0.0)
                    behind_s = np.maximum(behind_s, returned_s)
            chain.behind_s.append(behind_s)
            behind_s = np.where(passes.has_backward, behind_s + passes.leaving_s, 0.0)

    def _least_behind_s(self, edge: Edge) -> float:
        """From a gradient of the source's output to the end of its backwards."""
        found = []
        for chain in self._of(edge.source):
            index = _place(chain, edge.after_layer)
            passes = chain.passes[index]
            way_s = np.where(passes.has_backward, passes.leaving_s + chain.behind_s[index], 0.0)
            found += list(way_s[chain.used])
        return float(min(found, default=0.0))

    def _add_after(self, module: str, chain: _StageChain) -> None:
        leaving = [(_place(chain, e.after_layer), e) for e in self._model.edges_out_of(module)]
        after_s = turn_s = np.zeros(len(chain.counts))
        depth = 0
        for index in reversed(range(len(chain.stages))):
            passes = chain.passes[index]
            own_s = np.where(passes.has_backward, passes.leaving_s + chain.behind_s[index], 0.0)
            after_s = np.maximum(after_s, own_s)
            for at, edge in leaving:
                if at == index:
                    way_s, round_s, edge_depth = self._least_beyond(edge)
                    after_s, turn_s = np.maximum(after_s, way_s), np.maximum(turn_s, round_s)
                    depth = max(depth, edge_depth)
            chain.after_s.append(after_s)
            chain.turn_s.append(turn_s)
            chain.depth.append(depth)
            after_s = after_s + passes.forward_s
            turn_s = turn_s + passes.forward_s + passes.leaving_s
            depth += 1
        for found in (chain.after_s, chain.turn_s, chain.depth):
            found.reverse()

    def _least_beyond(self, edge: Edge) -> tuple[float, float, int]:
        """From the source's output to the end of a microbatch that reads it, and back to the output.

        And the most stages on the way out.
        """
        ways_s, rounds_s, depth = [], [], 0
        for chain in self._of(edge.target):
            index, reading = _place(chain, edge.before_layer), chain.used & self._reading(edge)
            passes = chain.passes[index]
            ways_s += list((passes.forward_s + chain.after_s[index])[reading])
            rounds_s += list((passes.forward_s + chain.turn_s[index] + passes.leaving_s)[reading])
            depth = max(depth, chain.depth[index] + 1)
        return float(min(ways_s, default=0.0)), float(min(rounds_s, default=0.0)), depth


def _place(chain: _StageChain, layer: int) -> int:
    """The stage with that layer."""
    return next(at for at, stage in enumerate(chain.stages) if stage.layers[0] <= layer < stage.layers[1])
