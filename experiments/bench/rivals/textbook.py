"""The textbook model in SimPy, for comparison: a process per rank and message, a Resource per link.

Shorter than the engine and good enough where links are never contended. But a Resource
grants requests in the order in which processes were created, so with contention times depend
on that order, and every wait costs a process switch.
"""

import time
from collections.abc import Callable, Sequence

from simpy.core import Environment
from simpy.events import ProcessGenerator
from simpy.resources.resource import Resource

from workbench.cost.hardware import Link
from workbench.memory.account import MemoryTable
from workbench.plan.lowered import Lowered, Transfer
from workbench.plan.plan import Program
from workbench.schedule.action import Action, Pass
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace


def simulate_textbook(
    lowered: Lowered, duration_s: Callable[[Action], float], *, memory: MemoryTable | None = None
) -> Trace:
    """Simulate a plan whose stages have one rank each and reduce nothing.

    Raises:
        ValueError: a stage of several ranks, a REDUCE_GRAD, or ranks that share cores.
    """
    plan = lowered.plan
    for stage in plan.stages:
        if len(stage.flat_ranks) > 1:
            raise ValueError(f"stage {stage.id}: the textbook model needs one rank, got {stage.flat_ranks}")
    if any(action.kind is Pass.REDUCE_GRAD for program in plan.programs for action in program.actions):
        raise ValueError("REDUCE_GRAD: the textbook model has no reductions")
    if any(node.num_cores is not None for node in plan.cluster.nodes):
        raise ValueError("the textbook model gives every rank a device of its own, this cluster shares cores")
    textbook = _Textbook(lowered, duration_s, memory)
    for program in plan.programs:
        textbook.env.process(textbook.run(program))
    textbook.env.run()
    return Trace(
        plan_hash="",
        executor=Executor.SIMULATED,
        spans=tuple(sorted(textbook.spans, key=lambda span: span.rank)),
        messages=tuple(sorted(textbook.messages)),
        memory=tuple(sorted(textbook.samples, key=lambda sample: sample.rank)),
    )


class _Textbook:
    def __init__(
        self, lowered: Lowered, duration_s: Callable[[Action], float], memory: MemoryTable | None
    ) -> None:
        self.env = Environment()
        self.spans: list[Span] = []
        self.messages: list[Message] = []
        self.samples: list[MemorySample] = []
        self._lowered = lowered
        self._duration_s = duration_s
        self._memory = memory or _nothing(lowered)
        self._arrived = [self.env.event() for _ in lowered.transfers]
        self._links: dict[tuple[str, int], Resource] = {}

    def run(self, program: Program) -> ProcessGenerator:
        """Execute a rank's actions in order."""
        rank, held_bytes = program.ranks[0], self._memory.static_bytes.get(program.ranks[0], 0)
        for index, action in enumerate(program.actions):
            for row in self._lowered.inputs.get(action, ()):
                yield self._arrived[row]
            start_s = self.env.now
            held_bytes += self._memory.acquired_bytes[rank][index]
            self.samples.append(MemorySample(rank, start_s, held_bytes))
            yield self.env.timeout(self._duration_s(action))
            held_bytes -= self._memory.released_bytes[rank][index]
            self.samples.append(MemorySample(rank, self.env.now, held_bytes))
            self.spans.append(Span(rank, Lane.COMPUTE, action, start_s, self.env.now))
            for row in self._lowered.outputs.get(action, ()):
                self.env.process(self.send(self._lowered.transfers[row]))

    def send(self, row: Transfer) -> ProcessGenerator:
        """Carry one row: wait for the link, occupy it, then add the latency."""
        ready_s, destination = self.env.now, row.destination_rank
        if destination != row.source_rank:
            resource, link = self._link(row)
            with resource.request() as turn:
                yield turn
                start_s = self.env.now
                yield self.env.timeout(row.num_bytes / link.bytes_per_s)
            yield self.env.timeout(link.latency_s)
            ends = row.row, row.edge, row.source_rank, destination, row.num_bytes
            self.messages.append(Message(*ends, ready_s, start_s, self.env.now))
        self._arrived[row.row].succeed()

    def _link(self, row: Transfer) -> tuple[Resource, Link]:
        cluster = self._lowered.plan.cluster
        node = cluster.node_of(row.source_rank)
        is_inside = cluster.node_of(row.destination_rank) == node
        key, link = (
            (("rank", row.source_rank), cluster.intra) if is_inside else (("node", node), cluster.inter)
        )
        if key not in self._links:
            self._links[key] = Resource(self.env)
        return self._links[key], link


def _nothing(lowered: Lowered) -> MemoryTable:
    """A memory table in which no action acquires or releases memory."""
    moved: dict[int, Sequence[int]] = {
        rank: [0] * len(program) for rank, program in lowered.plan.program.items()
    }
    return MemoryTable(dict.fromkeys(moved, 0), moved, moved)


def timeouts_per_s(num_processes: int, num_timeouts: int) -> float:
    """SimPy timeouts per CPU second, each awaited by a process with a delay of its own."""
    env = Environment()
    timeouts_each = -(-num_timeouts // num_processes)
    for process in range(num_processes):
        env.process(_wait(env, 1.0 + process / num_processes, timeouts_each))
    started = time.process_time()
    env.run()
    return num_processes * timeouts_each / (time.process_time() - started)


def _wait(env: Environment, length_s: float, times: int) -> ProcessGenerator:
    for _ in range(times):
        yield env.timeout(length_s)
