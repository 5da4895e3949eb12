"""The critical path of a step: the chain of work and waits whose durations add up to its time."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from workbench.explain.timeline import Piece, Timeline, timeline
from workbench.plan.lowered import Lowered
from workbench.schedule.action import MEANING, Action, Activity, Operation, Pass
from workbench.trace import Trace


class Cause(StrEnum):
    """What a step's time is spent on.

    STRAGGLER, INSIDE and LAUNCH are parts of passes, AT_STEP is part of STEP, see `pass_parts`.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENTS = "input gradients"
    WEIGHT_GRADIENTS = "weight gradients"
    COPY = "copies to and from the host"
    MESSAGE = "messages"
    QUEUE = "waiting for a link"
    ALL_GATHER = "all-gather of weights"
    REDUCE_SCATTER = "reduce-scatter of gradients"
    ALL_REDUCE = "gradient all-reduce"
    STEP = "optimizer step"
    HOST = "between actions"
    STRAGGLER = "straggling token shard"
    INSIDE = "collectives inside layers"
    LAUNCH = "launch and host"
    AT_STEP = "collectives at the optimizer step"


_OF_PASSES = {
    Pass.F: Cause.FORWARD,
    Pass.B: Cause.BACKWARD,
    Pass.I: Cause.INPUT_GRADIENTS,
    Pass.W: Cause.WEIGHT_GRADIENTS,
}
_OF_OPERATIONS = {
    Operation.ALL_GATHER: Cause.ALL_GATHER,
    Operation.REDUCE_SCATTER: Cause.REDUCE_SCATTER,
    Operation.ALL_REDUCE: Cause.ALL_REDUCE,
}
_OF_OTHERS = {Activity.COPY: Cause.COPY, Activity.RELEASE: Cause.COPY, Activity.UPDATE: Cause.STEP}


def _cause_of(kind: Pass) -> Cause:
    meaning = MEANING[kind]
    if meaning.operation is not None:
        return _OF_OPERATIONS[meaning.operation]
    return _OF_PASSES.get(kind) or _OF_OTHERS[meaning.activity]


CAUSES: dict[Pass, Cause] = {kind: _cause_of(kind) for kind in Pass}
COMPUTE = (
    Cause.FORWARD,
    Cause.BACKWARD,
    Cause.INPUT_GRADIENTS,
    Cause.WEIGHT_GRADIENTS,
)


class PathStep(NamedTuple):
    """One link of the path.

    Args:
        start_s, end_s: from the step's start; each starts where the previous one ends.
        cause: what the time is spent on.
        where: the module, or for messages the edge; "" for STEP and gaps.
        action: executed, or for messages the one that produced them; None for a gap.
        rank: the first that executes it, or the sender; None for a gap.
        node: of the plan's task graph; None for a gap.
    """

    start_s: float
    end_s: float
    cause: Cause
    where: str
    action: Action | None
    rank: int | None
    node: int | None

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


def critical_path(lowered: Lowered, trace: Trace) -> tuple[PathStep, ...]:
    """The chain of waits from the step's end back to its start, earliest first, without gaps.

    From the last end backwards, the path continues with whatever each action waited for longest: the
    preceding action on a rank, a message, or a collective's other ranks. A message's time is the wait for
    its link, then its time on the link. In a simulated trace each step starts when the previous one ends,
    and the path is a longest one through the task graph; gaps in executed traces are `Cause.HOST`.

    Args:
        lowered: the plan.
        trace: of that plan, simulated or executed.

    Returns:
        Steps of positive duration; the first starts at 0, the last ends at `trace.iteration_s`, so that
            durations add up to it.

    Raises:
        ValueError: a trace of another plan.

    Complexity: O(tasks + rows + edges + spans).
    """
    return path_of(timeline(lowered, trace))


def path_of(times: Timeline) -> tuple[PathStep, ...]:
    """The critical path of a timeline; see `critical_path`."""
    pieces = times.back_from(times.last, times.iteration_s)
    return tuple(step_of(times, piece) for piece in pieces)[::-1]


def step_of(times: Timeline, piece: Piece) -> PathStep:
    """Convert a piece of a chain of waits to a step of the path."""
    start_s, end_s, node, is_queued = piece
    if node is None:
        return PathStep(start_s, end_s, Cause.HOST, "", None, None, None)
    if node >= times.num_tasks:
        rows, row = times.lowered.rows, node - times.num_tasks  # few of many: in columns
        cause, edge = Cause.QUEUE if is_queued else Cause.MESSAGE, rows.edges[rows.edge[row]]
        source = rows.ends[rows.end[row]].source_rank
        return PathStep(start_s, end_s, cause, edge, rows.actions[rows.producer[row]], source, node)
    task = times.lowered.tasks.tasks[node]
    stage = task.action.stage
    module = "" if stage is None else times.lowered.plan.stage[stage].module
    return PathStep(start_s, end_s, CAUSES[task.action.kind], module, task.action, task.ranks[0], node)


def seconds_by_cause(steps: Iterable[PathStep]) -> dict[tuple[Cause, str], float]:
    """(cause, where) -> seconds on the path, most first."""
    seconds: dict[tuple[Cause, str], float] = {}
    for step in steps:
        key = step.cause, step.where
        seconds[key] = seconds.get(key, 0.0) + step.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
