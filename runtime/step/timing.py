"""Times of actions and messages: recorded per rank, and assembled into a trace."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from runtime.models.expert_tally import CountedLoad
from runtime.world.clock import HOST, Clock, Stamp
from workbench.float_sum import float_sum
from workbench.plan.lowered import Lowered, Route
from workbench.plan.parameter_shards import sharded_stages
from workbench.schedule.action import COMPUTE, FSDP, Action
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace


@dataclass(slots=True)
class Recorder:
    """Records one rank's step as stamps of its clock, which become seconds when the step has ended."""

    rank: int
    clock: Clock = HOST
    start_s: float = 0.0
    _spans: list[tuple[Lane, Action, Stamp, Stamp]] = field(default_factory=list)
    _memory: list[tuple[Stamp, int]] = field(default_factory=list)
    _sent: dict[int, Stamp] = field(default_factory=dict)
    _delivered: dict[int, Stamp] = field(default_factory=dict)
    _arrived: dict[int, Stamp] = field(default_factory=dict)
    _losses: list[tuple[Tensor | float, float]] = field(default_factory=list)

    def start_step(self) -> None:
        """Start a new step, and drop the previous one's records."""
        self.start_s = self.clock.start_step()
        self._spans, self._memory, self._losses = [], [], []
        self._sent, self._delivered, self._arrived = {}, {}, {}

    def span(self, lane: Lane, action: Action, start: Stamp, end: Stamp) -> None:
        self._spans.append((lane, action, start, end))

    def hold(self, time: Stamp, num_bytes: int) -> None:
        """Record the bytes in use from then on."""
        self._memory.append((time, num_bytes))

    def sent(self, row: int, time: Stamp) -> None:
        self._sent[row] = time

    def delivered(self, row: int, time: Stamp) -> None:
        """Record the end of a send at the sender."""
        self._delivered[row] = time

    def arrived(self, row: int, time: Stamp) -> None:
        """Record a row's arrival; on a CPU when the receiver noticed it, at the latest when it needed it."""
        self._arrived[row] = time

    def add_loss(self, loss: Tensor, scale: float) -> None:
        """Add a microbatch's loss sum, which is read only when the step's loss is."""
        self._losses.append((self.clock.scalar(loss), scale))

    @property
    def loss_sum(self) -> float:
        """Loss of this rank's microbatches; waits for the device."""
        return float_sum((float(loss) * scale for loss, scale in self._losses), 0.0)

    def notes(self) -> "Notes":
        """A frozen copy of a completed step's records, for sending."""
        seconds = self.clock.seconds
        return Notes(
            rank=self.rank,
            start_s=self.start_s,
            spans=tuple(
                Span(self.rank, lane, action, seconds(start), seconds(end))
                for lane, action, start, end in self._spans
            ),
            memory=tuple(MemorySample(self.rank, seconds(time), size) for time, size in self._memory),
            sent_s={row: seconds(time) for row, time in self._sent.items()},
            delivered_s={row: seconds(time) for row, time in self._delivered.items()},
            arrived_s={row: seconds(time) for row, time in self._arrived.items()},
            loss_sum=self.loss_sum,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Records of one rank's step.

    `yardstick_s`: seconds of a turn of the yardstick before and after it; empty if the rank does not read it.
    `expert_loads`: of each of its stages with experts.
    """

    rank: int
    start_s: float
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...]
    sent_s: dict[int, float]
    delivered_s: dict[int, float]
    arrived_s: dict[int, float]
    loss_sum: float
    yardstick_s: tuple[float, ...] = ()
    expert_loads: tuple[CountedLoad, ...] = ()


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
    """One trace from all ranks' notes of one step; time zero is the first rank's start.

    A gradient reduction is one span over all its groups; it starts when the last rank of the first group
    arrives, as waiting for a peer is not work. A message ends when its receiver noticed it, or its sender
    noticed the end of the send, whichever is first, as gloo reports neither earlier.
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
        loss=float_sum(note.loss_sum for note in notes),
        details=details,
    )


def _whole(spans: Sequence[Span]) -> Iterator[Span]:
    """Merge the groups of a reduction into one span, from its first start to its last end."""
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
    """(rank, exchange) -> arrival of the last rank of its first group, or of its unit."""
    units = sharded_stages(lowered.plan)
    issued: dict[Action | int, float] = {}  # collective -> the latest arrival
    meeting: dict[tuple[int, Action], Action | int] = {}
    for span in (span for note in notes for span in note.spans if span.lane is Lane.REDUCE):
        groups = lowered.reductions.get(span.action, ())
        if span.action.stage is not None and span.action.kind in FSDP:
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
    """Spread of one duration over repetitions."""

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
    """Spread of the iteration time."""
    return spread_of([trace.iteration_s for trace in traces])
