"""The sweep of a pipeline with more microbatches than its plan has, all of them equal."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sim.step.deadlock import DeadlockError
from sim.step.durations import task_durations_s
from sim.step.sweep_loop import run
from sim.step.wire import Wires, wires
from workbench.arrays import Floats, Ints
from workbench.plan.lowered import Lowered
from workbench.plan.task_graph import adjacency, num_missing
from workbench.schedule.action import Action, Pass, TaskKind
from workbench.timing.price import Price

Orders = tuple[tuple[Action, ...], ...]

KINDS = (Pass.B, Pass.F)  # by name, as rows of one tick are ordered


class MoreMicrobatches:
    """A lowered plan of m microbatches, compiled for repeated timing of M >= m of them.

    Passes and messages of every microbatch take as long as those of the plan's first one. Gradient reductions
    and weight updates follow the same passes as in the plan, counted from the last microbatch. Times equal
    those of `Sweep` on the plan of all M up to rounding: messages from one pass to another by one port follow
    each other without a gap, and are merged here, as are ports that carry the same.

    Args:
        lowered: of the plan of m microbatches, whose passes are F and B.
        orders: per program, the passes of all M microbatches.

    Raises:
        ValueError: a plan with all-gathers of sharded weights, or with messages that a rank forwards.

    Complexity: O(n) to compile n passes, and O(n log n) per timing, in compiled code.
    """

    def __init__(self, lowered: Lowered, orders: Orders) -> None:
        if any(task.kind is TaskKind.FSDP for task in lowered.tasks.tasks):
            raise ValueError(
                "sharded weights are gathered beside the passes: want the plan of all microbatches"
            )
        passes = _passes(lowered, orders)
        tail = _tail(lowered, passes)
        messages = _messages(lowered, passes)
        rows = passes.number + len(tail.tasks) + np.arange(len(messages.producer))
        before = np.concatenate((passes.before, tail.before, messages.producer, rows))
        after = np.concatenate((passes.after, tail.after, rows, messages.consumer))
        self._passes, self._tail = passes, tail
        self._wires = messages.wires
        self._waits = _waits(before, after, passes.number + len(tail.tasks) + len(rows))

    def iteration_s(self, lowered: Lowered, prices: Price) -> float:
        """Seconds of an iteration at prices of the same plan; DeadlockError where the orders never end."""
        durations_s = _durations_s(lowered, prices, self._passes, self._tail)
        end_s = _ends_s(durations_s, self._wires, self._waits)
        if np.isnan(end_s).any():
            raise DeadlockError("the orders of these microbatches never end: passes wait for each other")
        return float(end_s.max())


class _Waits(NamedTuple):
    """Dependencies: number of predecessors of each node, and its successors, as in `TaskGraph`."""

    missing: Ints
    offsets: Ints
    followers: Ints


def _waits(before: Ints, after: Ints, num_nodes: int) -> _Waits:
    return _Waits(num_missing(after, num_nodes), *adjacency(before, after, num_nodes))


def _ends_s(durations_s: Floats, wires_of_rows: Wires, waits: _Waits) -> Floats:
    """[N] end of each task, and of each row (numbered after the tasks)."""
    transmit_s, latency_s, port = wires_of_rows
    missing, offsets, later = waits
    return run(durations_s, (transmit_s, latency_s, port), missing.copy(), offsets, later)[1]


class _Passes(NamedTuple):
    """The passes, numbered by stage, kind and microbatch: the order of rows that are issued in one tick.

    Args:
        microbatches: M, their number.
        first: (stage, kind) -> number of the pass of the first microbatch.
        before, after: pairs of consecutive passes in a program.
    """

    microbatches: int
    first: dict[tuple[int | None, Pass], int]
    before: Ints
    after: Ints

    @property
    def number(self) -> int:
        return len(self.first) * self.microbatches

    def number_of(self, action: Action) -> int:
        return self.first[action.stage, action.kind] + (action.microbatch or 0)


class _Tail(NamedTuple):
    """The plan's tasks other than passes, and their edges; they are numbered after the passes."""

    tasks: list[int]
    before: Ints
    after: Ints


class _Messages(NamedTuple):
    """Messages in order: numbers of the producing and consuming passes, and their wires."""

    producer: Ints
    consumer: Ints
    wires: Wires


def _passes(lowered: Lowered, orders: Orders) -> _Passes:
    names = [(stage, kind) for stage in sorted(lowered.plan.stage) for kind in KINDS]
    microbatches = sum(map(len, orders)) // len(names)
    first: dict[tuple[int | None, Pass], int] = {
        name: index * microbatches for index, name in enumerate(names)
    }
    programs = [np.array([first[stage, kind] + (m or 0) for stage, kind, m in order]) for order in orders]
    return _Passes(
        microbatches,
        first,
        np.concatenate([program[:-1] for program in programs]),
        np.concatenate([program[1:] for program in programs]),
    )


def _tail(lowered: Lowered, passes: _Passes) -> _Tail:
    graph = lowered.tasks
    tasks = [number for number, task in enumerate(graph.tasks) if task.kind is not TaskKind.PASS]
    number_of = np.full(graph.num_nodes, -1)
    number_of[tasks] = passes.number + np.arange(len(tasks))
    edges = number_of[graph.after] >= 0
    more = passes.microbatches - len(lowered.plan.microbatches)
    for action, task in graph.passes.items():
        number_of[task] = passes.number_of(action) + more
    return _Tail(tasks, number_of[graph.before[edges]], number_of[graph.after[edges]])


def _durations_s(lowered: Lowered, prices: Price, passes: _Passes, tail: _Tail) -> Floats:
    known_s = np.array(task_durations_s(lowered, prices.durations_s, prices.steps_s))
    firsts = [lowered.tasks.passes[Action(stage, kind, 0)] for stage, kind in passes.first]
    return np.concatenate((np.repeat(known_s[firsts], passes.microbatches), known_s[tail.tasks]))


def _messages(lowered: Lowered, passes: _Passes) -> _Messages:
    """Messages of all microbatches, by the tick of their producers, as `lower` numbers rows."""
    lanes = _lanes(lowered, passes)
    each = np.arange(passes.microbatches)
    producer = (lanes.producer[:, None] + each).ravel()
    consumer = (lanes.consumer[:, None] + each).ravel()
    lane = np.repeat(np.arange(len(lanes.producer)), passes.microbatches)
    order = np.lexsort((lane, producer, _ticks(passes, producer, consumer)[producer]))
    transmit_s, latency_s, port = lanes.wires
    of_lane = lane[order]
    return _Messages(
        producer[order], consumer[order], Wires(transmit_s[of_lane], latency_s[of_lane], port[of_lane])
    )


def _lanes(lowered: Lowered, passes: _Passes) -> _Messages:
    """Messages of the first microbatch; those from one pass to another by one port are merged.

    Of ports that carry the same between the same passes, as with tensor-parallel ranks, one is kept: their
    messages start and arrive together.
    """
    rows = tuple(row for row in lowered.transfers if row.producer.microbatch == 0)
    if any(row.after is not None for row in rows):
        raise ValueError("messages are passed on inside a stage: want the plan of all microbatches")
    transmit_by_lane: dict[tuple[int, int, int, float], float] = {}
    for row, transmit_s, latency_s, port in zip(rows, *wires(replace(lowered, transfers=rows)), strict=True):
        ends = passes.number_of(row.producer), passes.number_of(row.consumer)
        key = (*ends, int(port), float(latency_s))
        transmit_by_lane[key] = transmit_by_lane.get(key, 0.0) + float(transmit_s)
    carried: dict[int, list[tuple[int, int, float, float]]] = {}
    for (producer, consumer, port, latency_s), transmit_s in transmit_by_lane.items():
        carried.setdefault(port, []).append((producer, consumer, latency_s, transmit_s))
    first = {tuple(lanes): port for port, lanes in reversed(carried.items())}
    lanes = [
        (*lane, transmit_s)
        for lane, transmit_s in transmit_by_lane.items()
        if first[tuple(carried[lane[2]])] == lane[2]
    ]
    table = np.array(lanes, dtype=float).reshape(-1, 5)
    producers, consumers, ports = table[:, :3].T.astype(np.int64)
    return _Messages(producers, consumers, Wires(table[:, 4].copy(), table[:, 3].copy(), ports))


def _ticks(passes: _Passes, producer: Ints, consumer: Ints) -> Floats:
    """End of each pass in ticks, if passes take one tick and messages none."""
    nothing = Wires(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
    before = np.concatenate((passes.before, producer))
    after = np.concatenate((passes.after, consumer))
    return _ends_s(np.ones(passes.number), nothing, _waits(before, after, passes.number))
