"""One replica's samples in a pipeline without messages, on which every method is evaluated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.entrain.stage_work import (
    MERGED,
    Cuts,
    Judge,
    Seconds,
    StageWork,
    Which,
    even_cuts,
    stage_work,
    tokens_of,
)
from experiments.entrain.workload import MEMORY_BYTES, TP, job_of
from workbench.balance.microbatches.assignment import MicrobatchAssignment
from workbench.data.sample import Sample, Segment
from workbench.float_sum import float_sum
from workbench.memory.sizes import Sizes
from workbench.memory.stage import state_of
from workbench.plan.plan import ModuleSettings, Plan, Recompute
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.planner.assembly import draft_plan
from workbench.schedule.action import Action, Pass
from workbench.schedule.adjacent import with_followers
from workbench.schedule.choice import Schedule
from workbench.schedule.eager import with_eager_forwards
from workbench.schedule.graph_aware import Consumer, ScheduleNode
from workbench.schedule.pass_graph import Group, PassGraph, Programs, finish_time, pass_graph
from workbench.schedule.programs import programs_of

Bytes = NDArray[np.float64]
PROBE = ((4096, 512), (2048, 256), (4096, 512), (2048, 256))  # (patches, text tokens) of a microbatch


class StageMemory(NamedTuple):
    """Bytes of one module on one rank of each stage.

    Args:
        kept_bytes: [samples, stages] from a forward to the end of its backward.
        working_bytes: [samples, stages] besides, while a pass runs.
        static_bytes: [stages] weights, gradients and optimizer state.
    """

    kept_bytes: Bytes
    working_bytes: Bytes
    static_bytes: Bytes

    def microbatches_bytes(self, microbatches: Sequence[Sequence[int]]) -> tuple[Bytes, Bytes]:
        """[microbatches, stages] kept and working."""
        kept, working = (
            np.array([table[list(positions)].sum(axis=0) for positions in microbatches])
            for table in (self.kept_bytes, self.working_bytes)
        )
        return kept, working


def stage_memory(
    llm: str, module: str, stages: int | Cuts, samples: Sequence[Sample], recompute: Recompute
) -> StageMemory:
    """Memory of every sample on every stage, for a number of stages or given cuts."""
    cuts = even_cuts(llm, module, stages) if isinstance(stages, int) else stages
    kept, working, static = _by_token(llm, module, cuts, recompute)
    tokens = tokens_of(samples, module)[:, None]
    return StageMemory(tokens * kept, tokens * working, static)


@cache
def _by_token(llm: str, module: str, cuts: Cuts, recompute: Recompute) -> tuple[Bytes, Bytes, Bytes]:
    """[stages] kept and working bytes per token, and static bytes."""
    plan = _probed(llm, module, cuts, recompute)
    sizes = Sizes(plan, routing_of(plan))
    stages = plan.chain[module, 0]
    (microbatch,) = plan.microbatches_of[module, 0]
    tokens = tokens_of(plan.batch, module).sum()
    sizes_of_stage = [sizes.of(stage, microbatch, keeps=True) for stage in stages]
    static = [sum(size for *_, size in state_of(plan, stage.flat_ranks[0])) for stage in stages]
    return (
        np.array([of.kept + of.output for of in sizes_of_stage]) / tokens,
        np.array([max(of.forward, of.accumulating) for of in sizes_of_stage]) / tokens,
        np.array(static, float),
    )


def _probed(llm: str, module: str, cuts: Cuts, recompute: Recompute) -> Plan:
    """A probe plan: one microbatch on the module's stages and one on the other's, on separate ranks."""
    batch = tuple(
        Sample(
            number,
            (Segment("vision", 0, patches, patches // MERGED), Segment("text", 1, text, text)),
        )
        for number, (patches, text) in enumerate(PROBE)
    )
    job = job_of("probe", llm, batch)
    module_settings = ModuleSettings(module=module, recompute=recompute)
    draft = draft_plan(replace(job, settings=replace(job.settings, modules=(module_settings,))), "probe")
    stages: list[Stage] = []
    for module_graph in draft.model.modules:
        for layers in cuts if module_graph.name == module else ((0, len(module_graph.layers)),):
            first = TP * len(stages)
            ranks = (tuple(range(first, first + TP)),)
            stages.append(
                Stage(id=len(stages), module=module_graph.name, replica=0, layers=layers, ranks=ranks)
            )
    return replace(draft, stages=tuple(stages))


class PipelineMemory:
    """Memory of a pipeline's passes, by stage."""

    def __init__(
        self, parts: Sequence[tuple[StageMemory, Sequence[Sequence[int]]]], capacity_bytes: float
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._static: list[float] = []
        self._kept: list[Bytes] = []
        self._working: list[Bytes] = []
        for memory, microbatches in parts:
            kept, working = memory.microbatches_bytes(microbatches)
            self._static += memory.static_bytes.tolist()
            self._kept += list(kept.T)
            self._working += list(working.T)

    def peak_bytes(self, program: Sequence[Action]) -> float:
        """Peak memory of a program's rank; what a split backward leaves counts until its W.

        Complexity: O(actions).
        """
        last = Pass.W if any(action.kind is Pass.W for action in program) else Pass.B
        passes = [
            (action.kind, action.stage, action.microbatch)
            for action in program
            if action.stage is not None and action.microbatch is not None
        ]
        held_bytes = float_sum(self._static[stage] for stage in {stage for _, stage, _ in passes})
        peak = held_bytes
        for kind, stage, microbatch in passes:
            kept = float(self._kept[stage][microbatch])
            held_bytes += kept * (kind is Pass.F)
            peak = max(peak, held_bytes + float(self._working[stage][microbatch]))
            held_bytes -= kept * (kind is last)
        return peak

    def fits(self, programs: Sequence[Sequence[Action]]) -> bool:
        """Whether every rank has the memory."""
        return all(self.peak_bytes(program) <= self.capacity_bytes for program in programs)


Positions = tuple[int, ...]
BLOCKS = 8  # of two GPUs each: the 16 of a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Samples of one replica, and the stages of its modules on separate ranks.

    Args:
        judge: whose seconds a step takes; `encoder_work` and `llm_work` are the balancer's estimates.
        recompute: of the encoder.
        seen: samples of an earlier step, for choices that a method may not base on this one.
    """

    llm: str
    samples: tuple[Sample, ...]
    stages: tuple[int, int]
    microbatch_samples: int = 4
    judge: Judge = Judge.EXACT
    recompute: Recompute = Recompute.NONE
    seen: tuple[Sample, ...] = ()

    def encoder_work(self, stages: int | Cuts | None = None) -> StageWork:
        return self._work("vision", stages or self.stages[0], Judge.EXACT)

    def llm_work(self, stages: int | Cuts | None = None) -> StageWork:
        return self._work("llm", stages or self.stages[1], Judge.EXACT)

    def _work(self, module: str, stages: int | Cuts, judge: Judge) -> StageWork:
        work = stage_work(self.llm, module, stages, self.samples, judge)
        recomputes = module == "vision" and self.recompute is not Recompute.NONE
        return work.recomputed() if recomputes else work

    def pipeline(self, encoder: int | Cuts, llm: int | Cuts, *, is_shared: bool = False) -> "Pipeline":
        """Work and memory of a step on these stages."""
        return Pipeline(
            self._work("vision", encoder, self.judge),
            self._work("llm", llm, self.judge),
            self._memory("vision", encoder),
            self._memory("llm", llm),
            is_shared,
        )

    @property
    def apart(self) -> "Pipeline":
        """The pipeline with all stages on separate ranks."""
        return self.pipeline(*self.stages)

    def _memory(self, module: str, stages: int | Cuts) -> StageMemory:
        recompute = self.recompute if module == "vision" else Recompute.NONE
        return stage_memory(self.llm, module, stages, self.samples, recompute)

    @property
    def num_microbatches(self) -> int:
        return len(self.samples) // self.microbatch_samples

    def chunks(self, order: Sequence[int]) -> tuple[Positions, ...]:
        """Consecutive samples of an order as microbatches."""
        size = self.microbatch_samples
        return tuple(tuple(order[start : start + size]) for start in range(0, len(order), size))


class Taken(NamedTuple):
    """A method's result on a replica: seconds of the step, and of forwards by microbatch."""

    iteration_s: float
    encoder_forward_s: Seconds
    llm_forward_s: Seconds


class ReplicaChain(NamedTuple):
    """Encoder stages before the LLM's, with separate microbatches."""

    encoder: tuple[Positions, ...]
    followers: Mapping[int, int]
    llm: tuple[Positions, ...]


def chain_of(assignment: MicrobatchAssignment) -> ReplicaChain:
    """Encoder microbatches split by consumer, the deferred part right after the kept one."""
    parts: list[Positions] = []
    followers: dict[int, int] = {}
    for positions, deferred in zip(assignment.encoder, assignment.deferred, strict=True):
        kept = tuple(index for index in positions if index not in deferred)
        if kept and deferred:
            followers[len(parts) + 1] = len(parts)
        parts += [part for part in (kept, deferred) if part]
    return ReplicaChain(tuple(parts), followers, assignment.llm)


def nodes_of(chain: ReplicaChain, num_encoder: int, num_llm: int) -> tuple[ScheduleNode, ...]:
    """Schedule nodes of the encoder's stages, from 0 on, then the LLM's."""
    produced = {position: number for number, positions in enumerate(chain.encoder) for position in positions}
    reads = tuple(tuple(sorted({produced[position] for position in positions})) for positions in chain.llm)
    last = num_encoder + num_llm - 1
    nodes = []
    for stage in range(last + 1):
        count = len(chain.encoder) if stage < num_encoder else len(chain.llm)
        needs = reads if stage == num_encoder - 1 else tuple((index,) for index in range(count))
        consumers = (Consumer(stage + 1, needs),) if stage < last else ()
        nodes.append(ScheduleNode(stage, count, (True,) * count, consumers))
    return tuple(nodes)


class Durations:
    """Seconds of every pass of a chain."""

    def __init__(self, chain: ReplicaChain, encoder: StageWork, llm: StageWork) -> None:
        self.num_encoder = encoder.forward_s.shape[1]
        self._tables = [
            tuple(work.microbatches_s(which, microbatches) for which in Which)
            for work, microbatches in ((encoder, chain.encoder), (llm, chain.llm))
        ]

    def __call__(self, action: Action) -> float:
        assert action.stage is not None
        assert action.microbatch is not None
        is_llm = action.stage >= self.num_encoder
        column = action.stage - self.num_encoder * is_llm
        forward, backward, weight = (
            float(table[action.microbatch, column]) for table in self._tables[is_llm]
        )
        return {
            Pass.F: forward,
            Pass.B: backward,
            Pass.I: backward - weight,
            Pass.W: weight,
        }[action.kind]


def played_s(
    nodes: Sequence[ScheduleNode], groups: Sequence[Group], programs: Programs, durations: Durations
) -> float:
    """Seconds until the last pass ends."""
    splits = any(action.kind is Pass.I for program in programs.values() for action in program)
    graph = pass_graph(nodes, groups, durations, backward=Pass.I if splits else Pass.B)
    return finish_time(graph, programs)


class Laid(NamedTuple):
    """A pass graph and programs without durations."""

    graph: PassGraph
    programs: Programs

    def played_s(self, durations: Durations) -> float:
        """Seconds until the last pass ends."""
        durations_s = tuple(map(durations, self.graph.actions))
        return finish_time(replace(self.graph, duration=durations_s), self.programs)


class Pipeline(NamedTuple):
    """Work and memory on both modules' stages; the last encoder and first LLM stage may share ranks."""

    encoder: StageWork
    llm: StageWork
    encoder_memory: StageMemory
    llm_memory: StageMemory
    is_shared: bool = False

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Stages of every block of ranks, encoder first."""
        depth = self.encoder.forward_s.shape[1]
        total = depth + self.llm.forward_s.shape[1]
        if not self.is_shared:
            return [(stage,) for stage in range(total)]
        apart = [(stage,) for stage in range(total)]
        return [*apart[: depth - 1], (depth - 1, depth), *apart[depth + 1 :]]

    def memory(self, chain: ReplicaChain) -> PipelineMemory:
        """Bytes of a chain's microbatches on all stages."""
        parts = ((self.encoder_memory, chain.encoder), (self.llm_memory, chain.llm))
        return PipelineMemory(parts, MEMORY_BYTES)


class Deferring:
    """A pipeline with deferral, whose encoder forwards may run ahead."""

    def __init__(self, pipeline: Pipeline, assignment: MicrobatchAssignment, schedule: Schedule) -> None:
        self._pipeline, self._chain = pipeline, chain_of(assignment)
        self._durations = Durations(self._chain, pipeline.encoder, pipeline.llm)
        depth = self._durations.num_encoder
        total = depth + pipeline.llm.forward_s.shape[1]
        self._nodes = nodes_of(self._chain, depth, total - depth)
        lines = (tuple(range(depth)), tuple(range(depth, total)))
        programs = programs_of(self._nodes, pipeline.groups, schedule, lines, self._durations)
        self._hurried = dict.fromkeys(range(depth), self._chain.followers)
        self._programs = {
            group: with_followers(program, self._hurried) for group, program in programs.items()
        }

    def seconds(self, lead: int) -> float:
        """Seconds of a step whose encoder forwards run `lead` microbatches ahead."""
        return played_s(self._nodes, self._pipeline.groups, self._ahead(lead), self._durations)

    def most_ahead(self) -> int:
        """The most microbatches of run-ahead that fit in memory, by bisection; 0 where none fits."""
        memory = self._pipeline.memory(self._chain)
        fitting, too_far = 0, len(self._chain.encoder) - len(self._chain.followers)
        while too_far - fitting > 1:
            middle = (fitting + too_far) // 2
            if memory.fits(tuple(self._ahead(middle).values())):
                fitting = middle
            else:
                too_far = middle
        return fitting

    def _ahead(self, lead: int) -> Programs:
        return {
            group: with_eager_forwards(program, self._hurried, lead)
            for group, program in self._programs.items()
        }
