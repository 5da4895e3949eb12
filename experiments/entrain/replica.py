"""One replica's samples in a pipeline without messages: what every method is tried on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from experiments.entrain.stage_work import Cuts, Seconds, StageWork, Which, stage_work
from workbench.balance.microbatches.assignment import MicrobatchAssignment
from workbench.data.sample import Sample
from workbench.schedule.action import Action, Pass
from workbench.schedule.adjacent import with_followers
from workbench.schedule.choice import Schedule
from workbench.schedule.eager import with_eager_forwards
from workbench.schedule.graph_aware import Consumer, ScheduleNode
from workbench.schedule.pass_graph import Group, PassGraph, Programs, finish_time, pass_graph
from workbench.schedule.programs import programs_of

Places = tuple[int, ...]
TP, BLOCKS = 2, 8  # 16 GPUs of a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Samples of one replica, and the stages that its modules have where they are apart."""

    llm: str
    samples: tuple[Sample, ...]
    stages: tuple[int, int]
    microbatch_samples: int = 4

    def encoder_work(self, stages: int | Cuts | None = None) -> StageWork:
        return stage_work(self.llm, "vision", stages or self.stages[0], self.samples)

    def llm_work(self, stages: int | Cuts | None = None) -> StageWork:
        return stage_work(self.llm, "llm", stages or self.stages[1], self.samples)

    @property
    def num_microbatches(self) -> int:
        return len(self.samples) // self.microbatch_samples

    def chunks(self, order: Sequence[int]) -> tuple[Places, ...]:
        """Consecutive samples of an order as microbatches."""
        size = self.microbatch_samples
        return tuple(tuple(order[at : at + size]) for at in range(0, len(order), size))


class Taken(NamedTuple):
    """What a method makes of a replica: seconds of the step, and of forwards by microbatch."""

    iteration_s: float
    encoder_forward_s: Seconds
    llm_forward_s: Seconds


class Chain(NamedTuple):
    """An encoder's stages in front of the LLM's, with microbatches of their own."""

    encoder: tuple[Places, ...]
    followers: Mapping[int, int]
    llm: tuple[Places, ...]


def chain_of(assignment: MicrobatchAssignment) -> Chain:
    """Encoder microbatches cut by consumer, the deferred part right behind the kept one."""
    parts: list[Places] = []
    followers: dict[int, int] = {}
    for places, deferred in zip(assignment.encoder, assignment.deferred, strict=True):
        kept = tuple(place for place in places if place not in deferred)
        if kept and deferred:
            followers[len(parts) + 1] = len(parts)
        parts += [each for each in (kept, deferred) if each]
    return Chain(tuple(parts), followers, assignment.llm)


def nodes_of(chain: Chain, num_encoder: int, num_llm: int) -> tuple[ScheduleNode, ...]:
    """Encoder stages from 0 on, then the LLM's."""
    produced = {place: number for number, places in enumerate(chain.encoder) for place in places}
    reads = tuple(tuple(sorted({produced[place] for place in places})) for places in chain.llm)
    last = num_encoder + num_llm - 1
    found = []
    for stage in range(last + 1):
        count = len(chain.encoder) if stage < num_encoder else len(chain.llm)
        needs = reads if stage == num_encoder - 1 else tuple((index,) for index in range(count))
        consumers = (Consumer(stage + 1, needs),) if stage < last else ()
        found.append(ScheduleNode(stage, count, (True,) * count, consumers))
    return tuple(found)


class Durations:
    """Seconds of every pass of a chain."""

    def __init__(self, chain: Chain, encoder: StageWork, llm: StageWork) -> None:
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
    """Passes and programs whose durations are open."""

    graph: PassGraph
    programs: Programs

    def played_s(self, durations: Durations) -> float:
        """Seconds until the last pass ends."""
        taken = tuple(map(durations, self.graph.actions))
        return finish_time(replace(self.graph, duration=taken), self.programs)


class Pipeline(NamedTuple):
    """Work on the stages of either module; the last encoder and the first LLM stage may share ranks."""

    encoder: StageWork
    llm: StageWork
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


def deferring_s(
    pipeline: Pipeline, assignment: MicrobatchAssignment, schedule: Schedule, lead: int = 0
) -> float:
    """Seconds of a step with deferral, encoder forwards `lead` microbatches ahead."""
    chain = chain_of(assignment)
    durations = Durations(chain, pipeline.encoder, pipeline.llm)
    depth = durations.num_encoder
    total = depth + pipeline.llm.forward_s.shape[1]
    nodes = nodes_of(chain, depth, total - depth)
    lines = (tuple(range(depth)), tuple(range(depth, total)))
    programs = programs_of(nodes, pipeline.groups, schedule, lines, durations)
    hurried = dict.fromkeys(range(depth), chain.followers)
    eager = {
        group: with_eager_forwards(with_followers(program, hurried), hurried, lead)
        for group, program in programs.items()
    }
    return played_s(nodes, pipeline.groups, eager, durations)
