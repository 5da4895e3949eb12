"""Why ranks are idle: every idle second of a step with its cause."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from workbench.explain.critical_path import COMPUTE, Cause, PathStep, step_of
from workbench.explain.timeline import Piece, Timeline, timeline
from workbench.float_sum import float_sum
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import Action
from workbench.trace import Lane, Span, Trace


class IdleCause(StrEnum):
    """What an idle rank waits for.

    FILL and DRAIN: other ranks' passes before its first and after its last one. STAGE: a pass that it needs
    next, or whatever that waits for. MICROBATCHES: the part of such a pass by which its microbatch is
    heavier than its stage's mean. RANKS: a collective of weights or gradients that it takes part in, while
    another of its ranks computes, which a faster link would not change. UNUSED: the plan gives it nothing.
    """

    FILL = "pipeline fills"
    DRAIN = "pipeline drains"
    STAGE = "waits for a stage"
    MICROBATCHES = "uneven microbatches"
    RANKS = "ranks with more work"
    MESSAGE = "exposed messages"
    QUEUE = "link is busy"
    ALL_GATHER = "exposed all-gather of weights"
    REDUCE_SCATTER = "exposed reduce-scatter of gradients"
    ALL_REDUCE = "exposed gradient all-reduce"
    COPY = "copies to and from the host"
    STEP = "optimizer step of other ranks"
    HOST = "between actions"
    UNUSED = "rank has no work"


_OF_SHARDS = (Cause.ALL_GATHER, Cause.REDUCE_SCATTER)
_COLLECTIVES = (*_OF_SHARDS, Cause.ALL_REDUCE)
_OF_STAGES = (IdleCause.FILL, IdleCause.DRAIN, IdleCause.STAGE, IdleCause.MICROBATCHES)
_OF_CAUSE: dict[Cause, IdleCause] = {
    Cause.COPY: IdleCause.COPY,
    Cause.MESSAGE: IdleCause.MESSAGE,
    Cause.QUEUE: IdleCause.QUEUE,
    Cause.ALL_GATHER: IdleCause.ALL_GATHER,
    Cause.REDUCE_SCATTER: IdleCause.REDUCE_SCATTER,
    Cause.ALL_REDUCE: IdleCause.ALL_REDUCE,
    Cause.STEP: IdleCause.STEP,
    Cause.HOST: IdleCause.HOST,
}


class IdlePiece(NamedTuple):
    """An interval in which a rank computes nothing.

    Args:
        rank: that is idle.
        start_s, end_s: from the step's start.
        cause: of the wait.
        where: the module, or for messages the edge, that it waits for; "" for none.
        stage: whose pass it waits for; None for other waits.
    """

    rank: int
    start_s: float
    end_s: float
    cause: IdleCause
    where: str
    stage: int | None

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


class _Gap(NamedTuple):
    """Idle time before a node: [start, end); `cause` applies to passes that are waited for.

    `ranks` execute the node; none after a rank's last action, where the node is another's.
    """

    start_s: float
    end_s: float
    node: int
    cause: IdleCause
    ranks: tuple[int, ...] = ()


def idle_time(lowered: Lowered, trace: Trace) -> tuple[IdlePiece, ...]:
    """Every idle second of every rank of the plan's cluster, by (rank, start).

    A rank waits for whatever its next action waits for: the chain of waits of the critical path, starting
    at that action. After a rank's last action it is the chain of the step's end.

    Returns:
        Pieces that, with the actions on the rank's compute lane, cover 0 to `trace.iteration_s` without gaps.

    Raises:
        ValueError: a trace of another plan.

    Complexity: O(ranks x actions + pieces).
    """
    return idle_of(timeline(lowered, trace), trace)


def idle_of(times: Timeline, trace: Trace) -> tuple[IdlePiece, ...]:
    """The idle time of a timeline; see `idle_time`."""
    pieces: list[IdlePiece] = []
    means_s = _mean_s(times)
    pieces_of_gap: dict[_Gap, tuple[IdlePiece, ...]] = {}
    busy: dict[int, list[Span]] = {}
    for span in trace.spans:
        if span.lane is Lane.COMPUTE:
            busy.setdefault(span.rank, []).append(span)
    computing = _Computing(busy)
    for rank in range(times.lowered.plan.cluster.num_ranks):
        if rank not in busy:
            pieces.append(IdlePiece(rank, 0.0, times.iteration_s, IdleCause.UNUSED, "", None))
            continue
        for gap in _gaps(times, busy[rank]):
            if gap not in pieces_of_gap:
                pieces_of_gap[gap] = tuple(_pieces(times, gap, means_s, computing))[::-1]
            pieces += (piece._replace(rank=rank) for piece in pieces_of_gap[gap])
    return tuple(piece for piece in pieces if piece.end_s > piece.start_s)


def _gaps(times: Timeline, spans: Iterable[Span]) -> Iterator[_Gap]:
    """Idle intervals of one rank's compute lane, each with what comes next on it."""
    graph = times.lowered.tasks
    in_time = sorted(spans, key=lambda span: (span.start_s, span.end_s))
    passes = [span for span in in_time if span.action in graph.passes]
    first_s = min((span.start_s for span in passes), default=times.iteration_s)
    last_s = max((span.end_s for span in passes), default=0.0)
    reached_s = 0.0
    for span in in_time:
        if span.start_s > reached_s:
            cause = IdleCause.STAGE
            if reached_s >= last_s:
                cause = IdleCause.DRAIN
            elif span.start_s <= first_s:
                cause = IdleCause.FILL
            node = times.node_of(span)
            yield _Gap(reached_s, span.start_s, node, cause, graph.tasks[node].ranks)
        reached_s = max(reached_s, span.end_s)
    if reached_s < times.iteration_s:
        yield _Gap(reached_s, times.iteration_s, times.last, IdleCause.DRAIN)


class _Computing:
    """When any of some ranks computes."""

    def __init__(self, spans: Mapping[int, Sequence[Span]]) -> None:
        self._spans = spans
        self._intervals: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def within(self, ranks: tuple[int, ...], start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Yield the intervals, latest first; O(log(spans) + intervals), once a group O(spans log(spans))."""
        if ranks not in self._intervals:
            self._intervals[ranks] = list(self._joined(ranks))
        intervals = self._intervals[ranks]
        index = bisect_left(intervals, (end_s,)) - 1
        while index >= 0 and intervals[index][1] > start_s:
            first_s, last_s = intervals[index]
            yield max(first_s, start_s), min(last_s, end_s)
            index -= 1

    def _joined(self, ranks: Iterable[int]) -> Iterator[tuple[float, float]]:
        spans = sorted((span.start_s, span.end_s) for rank in ranks for span in self._spans.get(rank, ()))
        reached = None
        for start_s, end_s in spans:
            if reached is not None and start_s > reached[1]:
                yield reached
                reached = None
            reached = (start_s, end_s) if reached is None else (reached[0], max(reached[1], end_s))
        if reached is not None:
            yield reached


def _pieces(
    times: Timeline, gap: _Gap, means_s: dict[Action, float], computing: _Computing
) -> Iterator[IdlePiece]:
    """Pieces of one gap, latest first, with rank -1.

    The chain may pass through a collective of the gap's ranks, and on through one of its other ranks. A pass
    of any of these is what keeps it from joining.
    """
    tasks, awaited = times.lowered.tasks.tasks, set[int]()
    for piece in times.back_from(gap.node, gap.end_s, gap.start_s):
        step = step_of(times, piece)
        ranks = tasks[step.node].ranks if step.node is not None and step.node < times.num_tasks else ()
        if step.cause in _COLLECTIVES and not (awaited or set(gap.ranks)).isdisjoint(ranks):
            awaited.update(ranks)
        if step.cause in _OF_SHARDS:
            yield from _of_collective(times, step, computing)
        else:
            cause = gap.cause if awaited.isdisjoint(ranks) else IdleCause.RANKS
            yield from _causes(times, piece, step, cause, means_s)


def _of_collective(times: Timeline, step: PathStep, computing: _Computing) -> Iterator[IdlePiece]:
    """Split a collective of sharded weights by whether any of its ranks computes."""
    assert step.node is not None, "a collective is a task"
    cause, until_s = _OF_CAUSE[step.cause], step.end_s
    for start_s, end_s in computing.within(times.lowered.tasks.tasks[step.node].ranks, step.start_s, until_s):
        yield IdlePiece(-1, end_s, until_s, cause, step.where, None)
        yield IdlePiece(-1, start_s, end_s, IdleCause.RANKS, step.where, None)
        until_s = start_s
    yield IdlePiece(-1, step.start_s, until_s, cause, step.where, None)


def _causes(
    times: Timeline, piece: Piece, step: PathStep, pass_cause: IdleCause, means_s: dict[Action, float]
) -> Iterator[IdlePiece]:
    """Split a piece of the chain of waits by idle cause."""
    stage = None if step.action is None else step.action.stage
    if step.cause not in COMPUTE or step.action is None:
        yield IdlePiece(-1, piece.start_s, piece.end_s, _OF_CAUSE[step.cause], step.where, stage)
        return
    split_s = piece.start_s
    if pass_cause is IdleCause.STAGE and piece.node is not None:
        whole_s = times.end_s[piece.node] - times.start_s[piece.node]
        excess = max(0.0, 1.0 - means_s[step.action] / whole_s)
        split_s += excess * (piece.end_s - piece.start_s)
    if split_s < piece.end_s:
        of_stage = stage if pass_cause in _OF_STAGES else None
        yield IdlePiece(-1, split_s, piece.end_s, pass_cause, step.where, of_stage)
    if piece.start_s < split_s:
        yield IdlePiece(-1, piece.start_s, split_s, IdleCause.MICROBATCHES, step.where, stage)


def _mean_s(times: Timeline) -> dict[Action, float]:
    """Pass -> mean seconds of its stage's passes of the same kind."""
    graph = times.lowered.tasks
    alike: dict[tuple[int | None, str], list[float]] = {}
    for action, task in graph.passes.items():
        alike.setdefault((action.stage, action.kind), []).append(times.end_s[task] - times.start_s[task])
    means = {key: float_sum(seconds) / len(seconds) for key, seconds in alike.items()}
    return {action: means[action.stage, action.kind] for action in graph.passes}


class IdleSeconds(NamedTuple):
    """Idle seconds of one cause, averaged over all ranks.

    Args:
        cause, where: as of its pieces.
        place: index of the awaited stage in its module's chain; None for other waits.
        seconds: total idle time of this cause over the number of ranks.
        is_layer: whether that stage is one layer, whose sharded weights are gathered alone: `place` is then
            the layer's index in the module.
    """

    cause: IdleCause
    where: str
    place: int | None
    seconds: float
    is_layer: bool = False


def idle_by_cause(plan: Plan, pieces: Iterable[IdlePiece]) -> tuple[IdleSeconds, ...]:
    """Idle seconds by cause, most first; stages at the same index of different replicas count together."""
    index_of = {stage.id: index for chain in plan.chain.values() for index, stage in enumerate(chain)}
    seconds_by_key: dict[tuple[IdleCause, str, int | None], float] = {}
    for piece in pieces:
        index = None if piece.stage is None or piece.cause not in _OF_STAGES else index_of[piece.stage]
        key = piece.cause, piece.where, index
        seconds_by_key[key] = seconds_by_key.get(key, 0.0) + piece.seconds
    by_cause = (
        IdleSeconds(
            *key,
            seconds / plan.cluster.num_ranks,
            is_layer=key[2] is not None and _is_cut_in_layers(plan, key[1]),
        )
        for key, seconds in seconds_by_key.items()
    )
    return tuple(sorted(by_cause, key=lambda each: -each.seconds))


def _is_cut_in_layers(plan: Plan, module: str) -> bool:
    """Whether each stage of the module is a layer that is gathered for itself, see `in_units`."""
    return plan.settings.of(module).shards_parameters and all(
        stage.layers[1] - stage.layers[0] == 1 for stage in plan.stages if stage.module == module
    )
