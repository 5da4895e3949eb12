"""When every task and row of a lowered plan happened in a trace, and what each of them waited for last."""

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
    """A stretch of a chain of waits.

    Args:
        start_s, end_s: of it.
        node: of the task graph that takes this long. None: nothing that the graph knows of; a gap between
            the end of what was waited for and the start.
        is_queued: a row that waits for its link.
    """

    start_s: float
    end_s: float
    node: int | None
    is_queued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Seconds of every node of the task graph: tasks first, then rows.

    Args:
        lowered: the plan.
        start_s, end_s: [N] of each; a row starts when it is ready.
        sent_s: [R] when a row's link took it.
        earlier: [N] whom each waits for.
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
        """Nodes from here on are rows."""
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
        """Of those that a node waits for, the one that ends last; ties go to the lower number."""
        return max(self.earlier[node], key=lambda other: (self.end_s[other], -other), default=None)

    def back_from(self, node: int, until_s: float, since_s: float = 0.0) -> Iterator[Piece]:
        """What a node's end waited for, latest first: pieces that cover `since_s` to `until_s` without gaps.

        Each piece is a node's own time, or time in which the next node of the chain had all that it
        waited for and had not begun, which a simulated trace does not have.

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
        """A node's own pieces in these seconds, the later first."""
        sent_s = start_s
        if node >= self.num_tasks:
            sent_s = min(max(self.sent_s[node - self.num_tasks], start_s), end_s)
        if sent_s < end_s:
            yield Piece(sent_s, end_s, node)
        if start_s < sent_s:
            yield Piece(start_s, sent_s, node, is_queued=True)


def timeline(lowered: Lowered, trace: Trace) -> Timeline:
    """The trace's times as those of the plan's tasks and rows.

    A trace has one span for all groups that a sum of gradients reduces. Between its ends each group starts
    when all that it waits for has ended, and ends when the next one begins that waited for nothing else, or
    takes what is left of the span in proportion to its elements.
    What the trace does not have took no time.

    Raises:
        ValueError: a trace of another plan; a plan whose tasks wait for each other in a ring.

    Complexity: O(tasks + rows + edges + spans).
    """
    _check_of(lowered, trace)
    graph = lowered.tasks
    found = Timeline(
        lowered=lowered,
        start_s=[nan] * graph.num_nodes,
        end_s=[nan] * graph.num_nodes,
        sent_s=[nan] * graph.num_rows,
        earlier=earlier(graph),
        iteration_s=trace.iteration_s,
    )
    sums = _with_spans(found, trace)
    _with_messages(found, trace)
    _fill(found, sums)
    return found


def earlier(graph: TaskGraph) -> list[list[int]]:
    """By node, whom it waits for."""
    offsets, flat = adjacency(graph.after, graph.before, graph.num_nodes)
    starts, before = offsets.tolist(), flat.tolist()
    return [before[starts[node] : starts[node + 1]] for node in range(graph.num_nodes)]


def _check_of(lowered: Lowered, trace: Trace) -> None:
    if not is_hash_of(trace.plan_hash, lowered.plan):
        own = plan_hash(lowered.plan)
        raise ValueError(f"the trace is of plan {trace.plan_hash:.16}, this plan is {own:.16}")


class _Sum(NamedTuple):
    """A span of a sum of gradients on one rank."""

    tasks: tuple[int, ...]
    end_s: float


def _with_spans(found: Timeline, trace: Trace) -> list[_Sum]:
    """Note what spans say; and spans of sums, which may be of several tasks.

    Executed spans of one task differ from rank to rank: it starts with the last and ends with the last.
    """
    graph = found.lowered.tasks
    joined = {
        (rank, each.action): each.tasks
        for program, collectives in zip(found.lowered.plan.programs, graph.fsdp, strict=True)
        for each in collectives
        for rank in program.ranks
    }
    joined |= {(rank, each.action): each.tasks for rank, lane in graph.reductions.items() for each in lane}
    sums = []
    for span in trace.spans:
        tasks = joined.get((span.rank, span.action)) or _alone(found, span.rank, span.action)
        if not tasks:
            continue
        _later(found.start_s, tasks[0], span.start_s)
        _later(found.end_s, tasks[-1], span.end_s)
        if len(tasks) > 1:
            sums.append(_Sum(tasks, span.end_s))
    return sums


def _alone(found: Timeline, rank: int, action: Action) -> tuple[int, ...]:
    """The task of a pass or of a rank's STEP."""
    graph = found.lowered.tasks
    task = graph.steps.get(rank) if action.stage is None else graph.passes.get(action)
    return () if task is None else (task,)


def _later(times_s: list[float], place: int, time_s: float) -> None:
    """Put the time there unless there is a later one."""
    if not times_s[place] >= time_s:
        times_s[place] = time_s


def _with_messages(found: Timeline, trace: Trace) -> None:
    for message in trace.messages:
        node = found.num_tasks + message.row
        _later(found.start_s, node, message.ready_s)
        _later(found.sent_s, message.row, message.start_s)
        _later(found.end_s, node, message.end_s)


def _fill(found: Timeline, sums: Iterable[_Sum]) -> None:
    """Give times to what the trace does not have: forward, each behind all that it waits for."""
    graph = found.lowered.tasks
    parts = _parts(found, sums)
    offsets, flat = graph.adjacency
    bounds, later = offsets.tolist(), flat.tolist()
    followers = [later[bounds[node] : bounds[node + 1]] for node in range(graph.num_nodes)]
    order = in_order(followers)
    if len(order) < graph.num_nodes:
        raise ValueError("the plan's tasks wait for each other in a ring; `workbench check` names them")
    for node in order:
        if isnan(found.start_s[node]):
            found.start_s[node] = max((found.end_s[other] for other in found.earlier[node]), default=0.0)
        if isnan(found.end_s[node]):
            found.end_s[node] = _end_s(found, node, parts.get(node, ()), followers[node])
        if node >= found.num_tasks and isnan(found.sent_s[node - found.num_tasks]):
            found.sent_s[node - found.num_tasks] = found.start_s[node]


def _parts(found: Timeline, sums: Iterable[_Sum]) -> dict[int, list[tuple[float, float]]]:
    """Task within spans of sums -> of each: its part of what is left at its start, and the span's end."""
    elements = {group.index: group.num_elements for group in found.lowered.groups}
    parts: dict[int, list[tuple[float, float]]] = {}
    for tasks, end_s in sums:
        groups = [found.lowered.tasks.tasks[task].group for task in tasks]
        sizes = [0 if group is None else elements[group] for group in groups]
        for index, task in enumerate(tasks):
            left = sum(sizes[index:])
            parts.setdefault(task, []).append((sizes[index] / left if left else 0.0, end_s))
    return parts


def _end_s(
    found: Timeline, node: int, parts: Sequence[tuple[float, float]], followers: Iterable[int]
) -> float:
    """When a task of a sum ended: when what nothing else held back began, or by its part of the span."""
    start_s = found.start_s[node]
    if not parts:
        return start_s
    for later in followers:
        begun_s = found.start_s[later]
        others = (found.end_s[other] for other in found.earlier[later] if other != node)
        if begun_s >= start_s and all(end_s < begun_s for end_s in others):
            return begun_s
    return min(start_s + part * max(0.0, end_s - start_s) for part, end_s in parts)
