"""Metrics of a step: pure functions of a trace's spans, messages and memory samples."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from workbench.float_sum import float_sum
from workbench.schedule.action import MEANING, Action, Activity, Pass
from workbench.trace import Lane, Span, Trace

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The main metrics of a step.

    Args:
        iteration_s: end of the last span or message.
        bubble_fraction: mean over ranks of the time in which a rank computes nothing.
        imbalance: busiest rank's compute time over the mean of all ranks, >= 1.
        exposed_communication_s: mean over ranks of the time in which a rank computes nothing
            while a message to it is on its way or its gradients are reduced; collectives inside layers,
            such as those of tensor parallelism, are part of their passes.
        peak_bytes: of the fullest rank; None for a trace without memory samples.
    """

    iteration_s: float
    bubble_fraction: float
    imbalance: float
    exposed_communication_s: float
    peak_bytes: int | None


def step_metrics(trace: Trace) -> StepMetrics:
    """All metrics of a step; ValueError for a trace without spans."""
    bubbles = bubble_fraction(trace).values()
    exposed = exposed_communication_s(trace).values()
    return StepMetrics(
        iteration_s=trace.iteration_s,
        bubble_fraction=float_sum(bubbles) / len(bubbles),
        imbalance=imbalance(trace),
        exposed_communication_s=float_sum(exposed) / len(exposed),
        peak_bytes=max(peak_bytes(trace).values(), default=None),
    )


def busy_s(trace: Trace) -> dict[int, float]:
    """Rank -> seconds in which its compute lane runs an action; ValueError without spans."""
    return {rank: union_s(intervals) for rank, intervals in _compute(trace).items()}


def bubble_fraction(trace: Trace) -> dict[int, float]:
    """Rank -> part of the iteration in which its compute lane is idle; 0 for a step that takes no time."""
    iteration_s = trace.iteration_s
    if iteration_s == 0:
        return dict.fromkeys(busy_s(trace), 0.0)
    return {rank: 1.0 - busy / iteration_s for rank, busy in busy_s(trace).items()}


def imbalance(trace: Trace) -> float:
    """Compute time of the busiest rank over the mean of all ranks; 1 when no rank computes."""
    busy = busy_s(trace).values()
    total_s = float_sum(busy)
    return max(busy) * len(busy) / total_s if total_s else 1.0


def peak_bytes(trace: Trace) -> dict[int, int]:
    """Rank -> peak memory; empty for a trace without memory samples."""
    peaks: dict[int, int] = {}
    for sample in trace.memory:
        peaks[sample.rank] = max(sample.num_bytes, peaks.get(sample.rank, 0))
    return peaks


def exposed_communication_s(trace: Trace) -> dict[int, float]:
    """Rank -> seconds in which it computes nothing while communication for it is under way.

    That is a message to it, from when it is ready at its sender until it arrives (so queueing for the link
    counts), or a reduction of its gradients. Idle time without either is a bubble of the schedule.
    """
    compute = _compute(trace)
    under_way: dict[int, list[Interval]] = {rank: [] for rank in compute}
    for message in trace.messages:
        under_way.setdefault(message.destination_rank, []).append((message.ready_s, message.end_s))
    for span in trace.spans:
        if span.lane is Lane.REDUCE:
            under_way[span.rank].append((span.start_s, span.end_s))
    return {
        rank: union_s(chain(intervals, compute.get(rank, ()))) - union_s(compute.get(rank, ()))
        for rank, intervals in under_way.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A rank's time from the start of its first span or message to the end of its last.

    Args:
        compute_s: it computes or updates weights, whatever else overlaps.
        other_s: it communicates, or copies to or from its host, and computes nothing.
        idle_s: neither.
        overlap_fraction: of the time in which it communicates, the part in which it computes too; None
            where it never communicates.
    """

    compute_s: float
    other_s: float
    idle_s: float
    overlap_fraction: float | None

    @property
    def total_s(self) -> float:
        return self.compute_s + self.other_s + self.idle_s


def temporal_breakdown(trace: Trace) -> dict[int, Breakdown]:
    """Rank -> its time by activity; messages count on both of their ranks while they are on the link.

    The terms are those of HolisticTraceAnalysis: temporal breakdown, communication-computation overlap.
    """
    computing: dict[int, list[Interval]] = {span.rank: [] for span in trace.spans}
    communicating: dict[int, list[Interval]] = {rank: [] for rank in computing}
    copying: dict[int, list[Interval]] = {rank: [] for rank in computing}
    for span in trace.spans:
        activity = MEANING[span.action.kind].activity
        lane = copying if activity is Activity.COPY else computing
        (communicating if span.lane is Lane.REDUCE else lane)[span.rank].append(_interval(span))
    for message in trace.messages:
        for rank in (message.source_rank, message.destination_rank):
            communicating.setdefault(rank, []).append((message.start_s, message.end_s))
    return {
        rank: _broken_down(computing.get(rank, []), communicating[rank], copying.get(rank, []))
        for rank in sorted(communicating)
    }


def _broken_down(
    computing: list[Interval], communicating: list[Interval], copying: list[Interval]
) -> Breakdown:
    all_intervals = [
        interval for interval in (*computing, *communicating, *copying) if interval[1] > interval[0]
    ]
    compute_s, busy, communicate_s = union_s(computing), union_s(all_intervals), union_s(communicating)
    whole_s = max((end_s for _, end_s in all_intervals), default=0.0) - min(
        (s for s, _ in all_intervals), default=0.0
    )
    hidden_s = compute_s + communicate_s - union_s(chain(computing, communicating))
    return Breakdown(
        compute_s=compute_s,
        other_s=busy - compute_s,
        idle_s=whole_s - busy,
        overlap_fraction=hidden_s / communicate_s if communicate_s > 0 else None,
    )


def action_s(trace: Trace) -> dict[Action, float]:
    """Action -> seconds on its slowest rank, in order of first appearance.

    Optimizer steps of all ranks are one entry.
    """
    seconds_of: dict[Action, float] = {}
    for span in trace.spans:
        seconds_of[span.action] = max(span.end_s - span.start_s, seconds_of.get(span.action, 0.0))
    return seconds_of


def time_by_kind(trace: Trace) -> dict[Pass, float]:
    """Pass -> summed seconds of its actions, each counted once however many ranks it ran on."""
    totals = dict.fromkeys(Pass, 0.0)
    for action, duration_s in action_s(trace).items():
        totals[action.kind] += duration_s
    return {kind: total for kind, total in totals.items() if total}


def _compute(trace: Trace) -> dict[int, list[Interval]]:
    """Rank -> intervals of its compute lane, ranks ascending."""
    if not trace.spans:
        raise ValueError("the trace has no spans, so there is no step to measure")
    intervals_of: dict[int, list[Interval]] = {
        rank: [] for rank in sorted({span.rank for span in trace.spans})
    }
    for span in trace.spans:
        if span.lane is Lane.COMPUTE:
            intervals_of[span.rank].append(_interval(span))
    return intervals_of


def _interval(span: Span) -> Interval:
    return span.start_s, span.end_s


def union_s(intervals: Iterable[Interval]) -> float:
    """Length of a union of intervals. O(n log n)."""
    total_s, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        if end_s > reached_s:
            total_s += end_s - max(start_s, reached_s)
            reached_s = end_s
    return total_s
