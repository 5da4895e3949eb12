"""When actions ran and messages travelled: recorded per rank, put together as a trace."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from workbench.plan.lowered import Lowered, Route
from workbench.plan.parameter_shards import sharded_stages
from workbench.schedule.action import COMPUTE, Action
from workbench.schedule.sharded import is_exchange
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace


@dataclass(slots=True)
class Recorder:
    """One rank's notes of one step, on the machine's monotonic clock."""

    rank: int
    start_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    sent_s: dict[int, float] = field(default_factory=dict)
    delivered_s: dict[int, float] = field(default_factory=dict)
    arrived_s: dict[int, float] = field(default_factory=dict)
    loss_sum: float = 0.0

    def start_step(self, start_s: float) -> None:
        """Forget the step before."""
        self.start_s = start_s
        self.spans, self.memory, self.loss_sum = [], [], 0.0
        self.sent_s, self.delivered_s, self.arrived_s = {}, {}, {}

    def span(self, lane: Lane, action: Action, start_s: float, end_s: float) -> None:
        self.spans.append(Span(self.rank, lane, action, start_s, end_s))

    def hold(self, time_s: float, num_bytes: int) -> None:
        """Bytes held from now on."""
        self.memory.append(MemorySample(self.rank, time_s, num_bytes))

    def sent(self, row: int, time_s: float) -> None:
        self.sent_s[row] = time_s

    def delivered(self, row: int, time_s: float) -> None:
        """The sender's end of a send."""
        self.delivered_s[row] = time_s

    def arrived(self, row: int, time_s: float) -> None:
        """When the receiver saw the row: at the latest when it needed it."""
        self.arrived_s[row] = time_s

    def notes(self) -> "Notes":
        """A frozen copy that travels."""
        return Notes(
            rank=self.rank,
            start_s=self.start_s,
            spans=tuple(self.spans),
            memory=tuple(self.memory),
            sent_s=dict(self.sent_s),
            delivered_s=dict(self.delivered_s),
            arrived_s=dict(self.arrived_s),
            loss_sum=self.loss_sum,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What one rank saw in one step."""

    rank: int
    start_s: float
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...]
    sent_s: dict[int, float]
    delivered_s: dict[int, float]
    arrived_s: dict[int, float]
    loss_sum: float


def check_order(lowered: Lowered, notes: Notes) -> None:
    """Raise RuntimeError unless the rank executed its passes in the order of its program."""
    planned = [action for action in lowered.plan.program[notes.rank] if action.kind in COMPUTE]
    executed = [span.action for span in notes.spans if span.action.kind in COMPUTE]
    if planned == executed:
        return
    position = next(
        (i for i, pair in enumerate(zip(planned, executed, strict=False)) if pair[0] != pair[1]),
        min(len(planned), len(executed)),
    )
    want = planned[position] if position < len(planned) else "nothing more"
    got = executed[position] if position < len(executed) else "nothing more"
    raise RuntimeError(
        f"rank {notes.rank} left the plan at action {position}: planned {want}, executed {got}"
    )


def assemble(
    lowered: Lowered, plan_hash: str, notes: Sequence[Notes], *, details: tuple[tuple[str, str], ...] = ()
) -> Trace:
    """One trace out of all ranks' notes of one step; time zero is the first rank's start.

    A REDUCE_GRAD is one span over all its groups; it starts when the last rank of the first group
    arrives: waiting for a peer is not work. A message ends when its receiver saw it, or its sender
    saw it gone, whichever came first: gloo tells neither side earlier.
    """
    zero_s = min(note.start_s for note in notes)
    notes = [replace(note, spans=tuple(_whole(note.spans))) for note in notes]
    arrivals = _reduction_starts(lowered, notes)
    spans = [
        span._replace(
            start_s=max(span.start_s, arrivals.get((span.rank, span.action), span.start_s)) - zero_s,
            end_s=span.end_s - zero_s,
        )
        for note in notes
        for span in note.spans
    ]
    samples = [sample._replace(time_s=sample.time_s - zero_s) for note in notes for sample in note.memory]
    return Trace(
        plan_hash=plan_hash,
        executor=Executor.EXECUTED,
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.lane, span.start_s))),
        messages=_messages(lowered, notes, zero_s),
        memory=tuple(sorted(samples, key=lambda sample: (sample.rank, sample.time_s))),
        loss=sum(note.loss_sum for note in notes),
        details=details,
    )


def _whole(spans: Sequence[Span]) -> Iterator[Span]:
    """The groups of a reduction as one span: from its first start to its last end."""
    groups: dict[Action, list[Span]] = {}
    for span in spans:
        if span.lane is Lane.REDUCE:
            groups.setdefault(span.action, []).append(span)
        else:
            yield span
    for parts in groups.values():
        start_s, end_s = min(part.start_s for part in parts), max(part.end_s for part in parts)
        yield parts[0]._replace(start_s=start_s, end_s=end_s)


def _messages(lowered: Lowered, notes: Sequence[Notes], zero_s: float) -> tuple[Message, ...]:
    by_rank = {note.rank: note for note in notes}
    messages = []
    for row in lowered.transfers:
        if row.route is Route.LOCAL:
            continue
        sender, receiver = by_rank[row.source_rank], by_rank[row.destination_rank]
        sent_s, arrived_s = sender.sent_s[row.row] - zero_s, receiver.arrived_s[row.row] - zero_s
        delivered_s = sender.delivered_s.get(row.row, receiver.arrived_s[row.row]) - zero_s
        end_s = max(sent_s, min(arrived_s, delivered_s))
        messages.append(
            Message(
                row.row,
                row.edge,
                row.source_rank,
                row.destination_rank,
                row.num_bytes,
                sent_s,
                sent_s,
                end_s,
            )
        )
    return tuple(messages)


def _reduction_starts(lowered: Lowered, notes: Sequence[Notes]) -> dict[tuple[int, Action], float]:
    """(rank, exchange) -> when the last rank of its first group, or of its unit, arrived."""
    units = sharded_stages(lowered.plan)
    issued: dict[Action | int, float] = {}  # by what the ranks meet in: the latest arrival
    meeting: dict[tuple[int, Action], Action | int] = {}
    for span in (span for note in notes for span in note.spans if span.lane is Lane.REDUCE):
        groups = lowered.reductions.get(span.action, ())
        if span.action.stage is not None and is_exchange(span.action, units):
            name: Action | int = span.action._replace(stage=units[span.action.stage].stages[0])
        elif groups:
            name = groups[0]
        else:
            continue
        issued[name] = max(issued.get(name, span.start_s), span.start_s)
        meeting[span.rank, span.action] = name
    return {key: issued[name] for key, name in meeting.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one duration over repetitions."""

    median_s: float
    lowest_s: float
    highest_s: float

    @property
    def relative(self) -> float:
        """Range over median."""
        return (self.highest_s - self.lowest_s) / self.median_s if self.median_s > 0 else 0.0


def spread_of(durations_s: Sequence[float]) -> Spread:
    """Median and range; ValueError for none."""
    if not durations_s:
        raise ValueError("want at least one duration, got none")
    return Spread(
        median_s=statistics.median(durations_s), lowest_s=min(durations_s), highest_s=max(durations_s)
    )


def iteration_spread(traces: Sequence[Trace]) -> Spread:
    """Of the whole step."""
    return spread_of([trace.iteration_s for trace in traces])


def action_spreads(traces: Sequence[Trace]) -> dict[tuple[int, Action], Spread]:
    """(rank, action) -> its duration over the traces of one plan."""
    durations: dict[tuple[int, Action], list[float]] = {}
    for trace in traces:
        for span in trace.spans:
            durations.setdefault((span.rank, span.action), []).append(span.end_s - span.start_s)
    return {key: spread_of(values) for key, values in durations.items()}


def median_trace(traces: Sequence[Trace]) -> Trace:
    """The trace whose iteration time is the (lower) median: one that really happened."""
    return sorted(traces, key=lambda trace: trace.iteration_s)[(len(traces) - 1) // 2]
