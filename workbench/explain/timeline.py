"""When every task and row of a lowered plan ran in a trace, and what each of them waited for."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import NamedTuple

from workbench.plan.codec import is_hash_of, plan_hash
from workbench.plan.lowered import Lowered
from workbench.plan.task_graph import TaskGraph, adjacency
from workbench.schedule.action import Action
from workbench.schedule.precedence import in_order
from workbench.trace import Span, Trace


class Piece(NamedTuple):
    """An interval in a chain of waits.

    Args:
        start_s, end_s: of it.
        node: of the task graph that takes this time. None: unknown to the graph; a gap between the end of
            what was waited for and the start.
        is_queued: a row that waits for its link.
    """

    start_s: float
    end_s: float
    node: int | None
    is_queued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of every node of the task graph: tasks first, then rows.

    Args:
        lowered: the plan.
        start_s, end_s: [N] of each; a row starts when it is ready.
        sent_s: [R] when a row's link took it.
        earlier: [N] nodes that each waits for.
        iteration_s: of the trace.
    """

    lowered: Lowered
    start_s: list[float]
    end_s: list[float]
    sent_s: list[float]
    earlier: list[list[int]]
    iteration_s: float

    @property
    def num_tasks(self) -> int:
        """Number of tasks; nodes from there on are rows."""
        return self.lowered.tasks.num_tasks

    def node_of(self, span: Span) -> int:
        """The task of a span of the compute lane."""
        tasks = self.lowered.tasks
        return tasks.passes[span.action] if span.action in tasks.passes else tasks.steps[span.rank]

    @property
    def last(self) -> int:
        """The node that ends last; of several the lowest."""
        return self.end_s.index(max(self.end_s))

    def latest_before(self, node: int) -> int | None:
        """The predecessor that ends last; ties go to the lower number."""
        return max(self.earlier[node], key=lambda other: (self.end_s[other], -other), default=None)

    def back_from(self, node: int, until_s: float, since_s: float = 0.0) -> Iterator[Piece]:
        """The chain of waits that led to a node's end, latest first; covers `since_s` to `until_s` without
        gaps.

        Each piece is a node's own time, or time in which the next node of the chain was ready but had not
        started, which does not occur in a simulated trace.

        Complexity: O(pieces x edges into each).
        """
        current: int | None = node
        while until_s > since_s:
            if current is None:
                yield Piece(since_s, until_s, None)
                return
            end_s = max(since_s, min(self.end_s[current], until_s))
            if end_s < until_s:
                yield Piece(end_s, until_s, None)
            start_s = max(since_s, min(self.start_s[current], end_s))
            yield from self._own(current, start_s, end_s)
            until_s, current = start_s, self.latest_before(current)

    def _own(self, node: int, start_s: float, end_s: float) -> Iterator[Piece]:
        """A node's own pieces within these seconds, the later first."""
        sent_s = start_s
        if node >= self.num_tasks:
            sent_s = min(max(self.sent_s[node - self.num_tasks], start_s), end_s)
        if sent_s < end_s:
            yield Piece(sent_s, end_s, node)
        if start_s < sent_s:
            yield Piece(start_s, sent_s, node, is_queued=True)


def timeline(lowered: Lowered, trace: Trace) -> Timeline:
    """Map the trace's times to the plan's tasks and rows.

    A trace has one span for all groups of an all-reduce of gradients. Within it, each group starts when all
    its predecessors have ended, and ends when the next task starts that waited for nothing else, or takes
    its share of the rest of the span by its elements. Whatever the trace lacks took no time.

    Raises:
        ValueError: a trace of another plan; a plan whose tasks wait for each other in a cycle.

    Complexity: O(tasks + rows + edges + spans).
    """
    _check_of(lowered, trace)
    graph = lowered.tasks
    times = Timeline(
        lowered=lowered,
        start_s=[nan] * graph.num_nodes,
        end_s=[nan] * graph.num_nodes,
        sent_s=[nan] * graph.num_rows,
        earlier=earlier(graph),
        iteration_s=trace.iteration_s,
    )
    sums = _with_spans(times, trace)
    _with_messages(times, trace)
    _fill(times, sums)
    return times


def earlier(graph: TaskGraph) -> list[list[int]]:
    """By node, its predecessors."""
    offsets, flat = adjacency(graph.after, graph.before, graph.num_nodes)
    starts, before = offsets.tolist(), flat.tolist()
    return [before[starts[node] : starts[node + 1]] for node in range(graph.num_nodes)]


def _check_of(lowered: Lowered, trace: Trace) -> None:
    if not is_hash_of(trace.plan_hash, lowered.plan):
        own = plan_hash(lowered.plan)
        raise ValueError(f"the trace is of plan {trace.plan_hash:.16}, this plan is {own:.16}")


class _Sum(NamedTuple):
    """A span of an all-reduce of gradients on one rank."""

    tasks: tuple[int, ...]
    end_s: float


def _with_spans(times: Timeline, trace: Trace) -> list[_Sum]:
    """Enter the spans' times, and return the spans of all-reduces with several tasks.

    Executed spans of one task differ from rank to rank: the latest start and the latest end count.
    """
    graph = times.lowered.tasks
    tasks_of = {
        (rank, each.action): each.tasks
        for program, collectives in zip(times.lowered.plan.programs, graph.fsdp, strict=True)
        for each in collectives
        for rank in program.ranks
    }
    tasks_of |= {(rank, each.action): each.tasks for rank, lane in graph.reductions.items() for each in lane}
    sums = []
    for span in trace.spans:
        tasks = tasks_of.get((span.rank, span.action)) or _single_task(times, span.rank, span.action)
        if not tasks:
            continue
        _raise_to(times.start_s, tasks[0], span.start_s)
        _raise_to(times.end_s, tasks[-1], span.end_s)
        if len(tasks) > 1:
            sums.append(_Sum(tasks, span.end_s))
    return sums


def _single_task(times: Timeline, rank: int, action: Action) -> tuple[int, ...]:
    """The task of a pass or of a rank's STEP."""
    graph = times.lowered.tasks
    task = graph.steps.get(rank) if action.stage is None else graph.passes.get(action)
    return () if task is None else (task,)


def _raise_to(times_s: list[float], index: int, time_s: float) -> None:
    """Set the time unless a later one is there."""
    if not times_s[index] >= time_s:
        times_s[index] = time_s


def _with_messages(times: Timeline, trace: Trace) -> None:
    for message in trace.messages:
        node = times.num_tasks + message.row
        _raise_to(times.start_s, node, message.ready_s)
        _raise_to(times.sent_s, message.row, message.start_s)
        _raise_to(times.end_s, node, message.end_s)


def _fill(times: Timeline, sums: Iterable[_Sum]) -> None:
    """Derive missing times in topological order, each from the node's predecessors."""
    graph = times.lowered.tasks
    parts = _parts(times, sums)
    offsets, flat = graph.adjacency
    bounds, later = offsets.tolist(), flat.tolist()
    followers = [later[bounds[node] : bounds[node + 1]] for node in range(graph.num_nodes)]
    order = in_order(followers)
    if len(order) < graph.num_nodes:
        raise ValueError("the plan's tasks wait for each other in a ring; `workbench check` names them")
    for node in order:
        if isnan(times.start_s[node]):
            times.start_s[node] = max((times.end_s[other] for other in times.earlier[node]), default=0.0)
        if isnan(times.end_s[node]):
            times.end_s[node] = _end_s(times, node, parts.get(node, ()), followers[node])
        if node >= times.num_tasks and isnan(times.sent_s[node - times.num_tasks]):
            times.sent_s[node - times.num_tasks] = times.start_s[node]


def _parts(times: Timeline, sums: Iterable[_Sum]) -> dict[int, list[tuple[float, float]]]:
    """For tasks within spans of all-reduces: their share of what is left at their start, and the span's
    end.
    """
    elements = {group.index: group.num_elements for group in times.lowered.groups}
    parts: dict[int, list[tuple[float, float]]] = {}
    for tasks, end_s in sums:
        groups = [times.lowered.tasks.tasks[task].group for task in tasks]
        sizes = [0 if group is None else elements[group] for group in groups]
        for index, task in enumerate(tasks):
            left = sum(sizes[index:])
            parts.setdefault(task, []).append((sizes[index] / left if left else 0.0, end_s))
    return parts


def _end_s(
    times: Timeline, node: int, parts: Sequence[tuple[float, float]], followers: Iterable[int]
) -> float:
    """When a task of an all-reduce ended: when a task that waited only for it started, or by its share
    of the span.
    """
    start_s = times.start_s[node]
    if not parts:
        return start_s
    for later in followers:
        begun_s = times.start_s[later]
        others = (times.end_s[other] for other in times.earlier[later] if other != node)
        if begun_s >= start_s and all(end_s < begun_s for end_s in others):
            return begun_s
    return min(start_s + part * max(0.0, end_s - start_s) for part, end_s in parts)
