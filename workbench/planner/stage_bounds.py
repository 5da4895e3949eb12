"""Lower bounds on a plan's seconds and memory, from its stages, before it is built."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.arrays import Flags
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.memory.sizes import Sizes
from workbench.memory.stage import GRADIENTS, state_of
from workbench.model.model_graph import Edge
from workbench.plan.optimizer_shards import state_shards
from workbench.plan.plan import KeyExchange, Plan
from workbench.plan.routing import Routing, routing_of
from workbench.plan.stage import Stage
from workbench.planner.planner_cost import PlannerCost
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.timing.stage_seconds import PassSeconds, Seconds, StageSeconds
from workbench.units import gib

_Key = tuple[str, int]  # module and replica


class _Stage(NamedTuple):
    """[kinds] a planner's estimates for a stage; `leaving_s` is the part of its backward others wait for."""

    forward_s: Seconds
    backward_s: Seconds
    leaving_s: Seconds
    has_backward: Flags


class _StageChain(NamedTuple):
    """The stages of a replica in layer order, and its counts of microbatches by kind.

    By stage: `ahead_s` precedes a forward, `behind_s` follows a backward, `after_s` follows a forward,
    `turn_s` lies between a forward and its backward, and `depth` stages follow it on the longest path.
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
    """Bounds on the plans of one draft for any stages.

    Args:
        draft: with microbatches.
        cost: the machine, and others beside it.
        planner_cost: estimates of the planner whose plans are bounded.
        schedule: the schedule of the plans.
    """

    def __init__(self, draft: Plan, cost: CostModel, planner_cost: PlannerCost, schedule: Schedule) -> None:
        self._seconds = StageSeconds(draft, cost)
        self._planner_cost, self._schedule = planner_cost, schedule
        self._is_aligned = _is_aligned(draft)
        self._held: dict[tuple[object, ...], int] = {}

    def seconds(self, plan: Plan) -> float:
        """A lower bound, by the planner's estimate, on the seconds of every order of these stages' passes.

        The maximum over ranks of all their passes, plus what precedes the first and follows the last, and
        over microbatches of the path through all stages. Messages take no time. Under 1F1B with the same
        microbatches everywhere, a stage alone on its ranks also idles until its first backward arrives,
        and until its last microbatch comes back.

        Raises:
            ValueError: a stage on ranks of several kinds.

        Complexity: O(stages x distinct microbatches), besides pricing new grids.
        """
        if any(stage.cp > 1 and _exchanges_otherwise(plan, stage) for stage in plan.stages):
            return 0.0  # another kernel's attention, which may be faster than the one summed up here
        if plan.has_joint_replicas:
            return 0.0  # the draft's microbatches are those of all joint replicas
        read = {module.name: _is_read(plan, module.name) for module in plan.model.modules}
        chains = {key: self._chain(plan, key, read) for key in plan.chain}
        _Paths(plan, self._seconds, chains)
        has_gaps = self._has_gaps(plan)
        most_s = 0.0
        lines: dict[tuple[int, ...], list[tuple[float, float, float]]] = {}
        for chain in chains.values():
            if chain.used.any():
                most_s = max(most_s, self._path_s(chain))
                for stage, line in zip(chain.stages, self._lines(chain, has_gaps=has_gaps), strict=True):
                    lines.setdefault(tuple(sorted(stage.flat_ranks)), []).append(line)
        for lines_of_ranks in lines.values():
            ahead, passes_s, behind = zip(*lines_of_ranks, strict=True)
            most_s = max(most_s, min(ahead) + float_sum(passes_s) + min(behind))
        return most_s

    def check_memory(self, plan: Plan) -> None:
        """Raise ValueError for stages whose lower bound on memory does not fit.

        Complexity: O(ranks), besides sizing new stages.
        """
        if self._schedule.offload:
            return
        held_bytes: Counter[int] = Counter()
        routing = routing_of(plan)
        for rank in plan.ranks:
            index = plan.cluster.node_of(rank)
            node = plan.cluster.nodes[index]
            if node.num_cores is None:
                held_bytes[index] = 0
            held_bytes[index] += self.held_bytes(routing, rank)
            if held_bytes[index] > node.memory_bytes:
                raise ValueError(
                    f"rank {rank} does not fit: {gib(held_bytes[index]):.3g} GiB at least, but node {index} "
                    f"({node.device}) has {gib(node.memory_bytes):.3g} GiB; want recompute, sharding or more "
                    "stages"
                )

    def held_bytes(self, routing: Routing, rank: int) -> int:
        """A lower bound on a rank's bytes: state in its STEP, or weights and microbatches in flight.

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
        """A lower bound on the forwards before a stage's first backward; 0 where unknown or without one."""
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
        """A lower bound on the bytes that `num_forwards` forwards of a stage keep."""
        if num_forwards == 0:
            return 0
        sizes = Sizes(routing.plan, routing)
        microbatches = routing.plan.microbatches_of[stage.module, stage.replica]
        kept_bytes = [
            size.kept - size.input_kept if routing.has_backward(stage, microbatch) else 0
            for microbatch in {self._seconds.kind_of(m): m for m in microbatches}.values()
            for size in [sizes.of(stage, microbatch, keeps=True)]
        ]
        return min(kept_bytes) * num_forwards

    def _is_trained(self, plan: Plan, stage: Stage) -> bool:
        passes = self._seconds.passes(plan, stage)
        kinds = [
            self._seconds.kind_of(m) for m in plan.microbatches_of.get((stage.module, stage.replica), ())
        ]
        return _is_read(plan, stage.module) and bool(passes.trains_all[kinds].any())

    def _chain(self, plan: Plan, key: _Key, read: dict[str, bool]) -> _StageChain:
        module, _ = key
        counts = np.zeros(len(self._seconds.kinds(module)), dtype=np.int64)
        for microbatch in plan.microbatches_of.get(key, ()):
            counts[self._seconds.kind_of(microbatch)] += 1
        stages = plan.chain[key]
        passes = (self._seconds.passes(plan, stage) for stage in stages)
        estimates = tuple(self._believed(seconds, seconds.has_backward & read[module]) for seconds in passes)
        return _StageChain(stages, estimates, counts, [], [], [], [], [])

    def _believed(self, seconds: PassSeconds, has: Flags) -> _Stage:
        if not self._schedule.spec.splits_backward:
            forward_s, backward_s = self._planner_cost.passes_s(seconds.forward_s, seconds.whole_s, has)
            return _Stage(forward_s, backward_s, backward_s, has)
        shorter_s = np.minimum(seconds.whole_s, seconds.through_s + seconds.weights_s)
        forward_s, backward_s = self._planner_cost.passes_s(seconds.forward_s, shorter_s, has)
        return _Stage(forward_s, backward_s, np.zeros_like(backward_s), has)

    def _has_gaps(self, plan: Plan) -> bool:
        """Whether under 1F1B every stage has its own ranks, so that its depth sets its forwards in flight."""
        if self._schedule.kind is not ScheduleKind.ONE_F_ONE_B or self._schedule.run_ahead:
            return False
        return self._is_aligned and all(len(stages) == 1 for stages in plan.stages_on.values())

    def _lines(self, chain: _StageChain, *, has_gaps: bool) -> Iterator[tuple[float, float, float]]:
        """Yield for every stage the seconds before its first pass, of all its passes, and after its last."""
        for index, passes in enumerate(chain.passes):
            last_s = np.where(passes.has_backward, chain.behind_s[index], chain.after_s[index])
            if self._schedule.spec.splits_backward:  # the last may be a W, for which nothing waits
                last_s = np.where(passes.has_backward, 0.0, last_s)
            passes_s = float((passes.forward_s + passes.backward_s) @ chain.counts)
            if has_gaps and passes.has_backward[chain.used].all():
                passes_s += _gaps_s(chain, index)
            ahead_s, behind_s = chain.ahead_s[index][chain.used], last_s[chain.used]
            yield float(ahead_s.min()), passes_s, float(behind_s.min())

    def _path_s(self, chain: _StageChain) -> float:
        """Seconds of the longest path of one microbatch."""
        whole_s = chain.ahead_s[0] + chain.passes[0].forward_s + chain.after_s[0]
        return float(whole_s[chain.used].max())


def _gaps_s(chain: _StageChain, index: int) -> float:
    """Idle seconds of a stage under 1F1B, with n forwards at the start and n backwards at the end."""
    passes, num = chain.passes[index], int(chain.counts.sum())
    between = min(chain.depth[index], num - 1)  # n - 1
    turn_s = float(chain.turn_s[index][chain.used].min())
    first_s = turn_s - between * float(passes.forward_s[chain.used].max())
    last_s = turn_s - between * float(passes.backward_s[chain.used].max())
    if between == num - 1:  # all forwards, then all backwards: one gap
        return max(0.0, first_s)
    return max(0.0, first_s) + max(0.0, last_s)


def _is_aligned(plan: Plan) -> bool:
    """Whether microbatches of the same index have the same samples in all modules of a replica."""
    samples: dict[tuple[int, int], list[set[int]]] = {}
    for microbatch in plan.microbatches:
        sample_sets = {item.sample for item in microbatch.items}
        samples.setdefault((microbatch.replica, microbatch.index), []).append(sample_sets)
    modules = len(plan.model.modules)
    return all(
        len(sample_sets) == modules
        and all(samples_of_module == sample_sets[0] for samples_of_module in sample_sets)
        for sample_sets in samples.values()
    )


def _exchanges_otherwise(plan: Plan, stage: Stage) -> bool:
    return plan.settings.of(stage.module).key_exchange is not KeyExchange.ALL_GATHER


def _is_read(plan: Plan, module: str) -> bool:
    """Whether every microbatch of a module is used: it has a loss, or the only copy of its items."""
    if plan.model.module(module).has_loss:
        return True
    if not plan.model.edges_out_of(module):
        return False
    items = [item for m in plan.microbatches if m.module == module for item in m.items]
    return len(items) == len(set(items))


class _Paths:
    """Fills in what precedes and follows every stage, from module to module along the edges."""

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
        """[kinds] whether the target's microbatches contain items of the source."""
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
        """Seconds until the first of the source's microbatches is done."""
        ends_s = []
        for chain in self._of(edge.source):
            index = _stage_index(chain, edge.after_layer)
            done_s = chain.ahead_s[index] + chain.passes[index].forward_s
            ends_s += list(done_s[chain.used])
        return float(min(ends_s, default=0.0))

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
        """Seconds from a gradient of the source's output to the end of its backwards."""
        ends_s = []
        for chain in self._of(edge.source):
            index = _stage_index(chain, edge.after_layer)
            passes = chain.passes[index]
            end_s = np.where(passes.has_backward, passes.leaving_s + chain.behind_s[index], 0.0)
            ends_s += list(end_s[chain.used])
        return float(min(ends_s, default=0.0))

    def _add_after(self, module: str, chain: _StageChain) -> None:
        leaving = [(_stage_index(chain, e.after_layer), e) for e in self._model.edges_out_of(module)]
        after_s = turn_s = np.zeros(len(chain.counts))
        depth = 0
        for index in reversed(range(len(chain.stages))):
            passes = chain.passes[index]
            back_s = np.where(passes.has_backward, passes.leaving_s + chain.behind_s[index], 0.0)
            after_s = np.maximum(after_s, back_s)
            for reader_index, edge in leaving:
                if reader_index == index:
                    path_s, round_s, edge_depth = self._least_beyond(edge)
                    after_s, turn_s = np.maximum(after_s, path_s), np.maximum(turn_s, round_s)
                    depth = max(depth, edge_depth)
            chain.after_s.append(after_s)
            chain.turn_s.append(turn_s)
            chain.depth.append(depth)
            after_s = after_s + passes.forward_s
            turn_s = turn_s + passes.forward_s + passes.leaving_s
            depth += 1
        for reversed_list in (chain.after_s, chain.turn_s, chain.depth):
            reversed_list.reverse()

    def _least_beyond(self, edge: Edge) -> tuple[float, float, int]:
        """Seconds from the source's output to the end of a microbatch that reads it, and back to the output.

        And the largest number of stages on the way.
        """
        paths_s, rounds_s, depth = [], [], 0
        for chain in self._of(edge.target):
            index, reading = _stage_index(chain, edge.before_layer), chain.used & self._reading(edge)
            passes = chain.passes[index]
            paths_s += list((passes.forward_s + chain.after_s[index])[reading])
            rounds_s += list((passes.forward_s + chain.turn_s[index] + passes.leaving_s)[reading])
            depth = max(depth, chain.depth[index] + 1)
        return float(min(paths_s, default=0.0)), float(min(rounds_s, default=0.0)), depth


def _stage_index(chain: _StageChain, layer: int) -> int:
    """The index of the stage with that layer."""
    return next(
        index for index, stage in enumerate(chain.stages) if stage.layers[0] <= layer < stage.layers[1]
    )
