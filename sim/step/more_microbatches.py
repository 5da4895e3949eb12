"""The sweep of a pipeline with more microbatches than its plan holds, all of them alike."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.step.deadlock import DeadlockError
from sim.step.durations import task_durations_s
from sim.step.sweep_loop import run
from sim.step.wire import Wires, wires
from workbench.plan.lowered import Lowered
from workbench.plan.task_graph import adjacency, num_missing
from workbench.schedule.action import Action, Pass, TaskKind
from workbench.timing.price import Price

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = (Pass.B, Pass.F)  # in the order of `issue_key`


def iteration_of_more_s(lowered: Lowered, prices: Price, orders: Sequence[Sequence[Action]]) -> float:
    """Seconds of an iteration of M microbatches, where the plan holds m <= M of them.

    Every microbatch takes what the plan's first one takes, and so do its messages. What reduces gradients
    and updates weights stands behind the same passes as in the plan, counted from the last microbatch.
    Times are those of `Sweep` on the plan of all M but for the last bits: messages from one pass to another
    by one port follow each other without a gap, and are one here.

    Args:
        lowered: of the plan of m microbatches, whose passes are F and B.
        prices: of that plan.
        orders: by its programs, the passes of all M microbatches.

    Raises:
        ValueError: a plan with gathers of sharded weights, or with messages that a rank passes on.
        DeadlockError: orders that never end.

    Complexity: O(n) to read n passes, and O(n log n) in compiled code.
    """
    if any(task.kind is TaskKind.FSDP for task in lowered.tasks.tasks):
        raise ValueError("sharded weights are gathered beside the passes: want the plan of all microbatches")
    passes = _passes(lowered, orders)
    tail = _tail(lowered, passes)
    messages = _messages(lowered, passes)
    rows = passes.number + len(tail.tasks) + np.arange(len(messages.producer))
    before = np.concatenate((passes.before, tail.before, messages.producer, rows))
    after = np.concatenate((passes.after, tail.after, rows, messages.consumer))
    end_s = _ends_s(_durations_s(lowered, prices, passes, tail), messages.wires, before, after)
    if np.isnan(end_s).any():
        raise DeadlockError("the orders of these microbatches never end: passes wait for each other")
    return float(end_s.max())


def _ends_s(durations_s: Floats, wires_of_rows: Wires, before: Ints, after: Ints) -> Floats:
    """[N] when each task and each row behind them ends."""
    transmit_s, latency_s, port = wires_of_rows
    num_nodes = len(durations_s) + len(port)
    missing, edges = num_missing(after, num_nodes), adjacency(before, after, num_nodes)
    return run(durations_s, (transmit_s, latency_s, port), missing, *edges)[1]


class _Passes(NamedTuple):
    """Passes are numbered by stage, kind and microbatch, so that numbers ascend as `issue_key` does.

    Args:
        microbatches: M.
        first: (stage, kind) -> number of its first microbatch.
        before, after: passes that follow each other in a program.
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
    """The plan's tasks that are no passes, and their edges; they are numbered behind the passes."""

    tasks: list[int]
    before: Ints
    after: Ints


class _Messages(NamedTuple):
    """In their order: numbers of their passes, and their wires."""

    producer: Ints
    consumer: Ints
    wires: Wires


def _passes(lowered: Lowered, orders: Sequence[Sequence[Action]]) -> _Passes:
    names = [(stage, kind) for stage in sorted(lowered.plan.stage) for kind in KINDS]
    microbatches = sum(map(len, orders)) // len(names)
    first: dict[tuple[int | None, Pass], int] = {
        name: place * microbatches for place, name in enumerate(names)
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
    """Of all microbatches, by the tick of their producers, as `lower` numbers rows."""
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
    """Of the first microbatch, what goes from one pass to another by one port added up."""
    rows = tuple(row for row in lowered.transfers if row.producer.microbatch == 0)
    if any(row.after is not None for row in rows):
        raise ValueError("messages are passed on inside a stage: want the plan of all microbatches")
    found: dict[tuple[int, int, int, float], float] = {}
    for row, transmit_s, latency_s, port in zip(rows, *wires(replace(lowered, transfers=rows)), strict=True):
        key = passes.number_of(row.producer), passes.number_of(row.consumer), int(port), float(latency_s)
        found[key] = found.get(key, 0.0) + float(transmit_s)
    producer, consumer, port = (np.array([key[place] for key in found], dtype=np.int64) for place in range(3))
    latency_s = np.array([key[3] for key in found], dtype=float)
    return _Messages(producer, consumer, Wires(np.array([*found.values()], dtype=float), latency_s, port))


def _ticks(passes: _Passes, producer: Ints, consumer: Ints) -> Floats:
    """When each pass ends if all take one tick, and messages none."""
    nothing = Wires(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
    before = np.concatenate((passes.before, producer))
    after = np.concatenate((passes.after, consumer))
    return _ends_s(np.ones(passes.number), nothing, before, after)
