"""What happened when: the one schema that simulator and runtime both return."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from workbench.headline import Headline
from workbench.schedule.action import Action


class Executor(StrEnum):
    SIMULATED = "simulated"
    EXECUTED = "executed"
    EMULATED = "emulated"  # actions timed alone on one device, put together by the plan's dependencies


class Lane(StrEnum):
    """Compute, sending (messages occupying a link), gradient reduction."""

    COMPUTE = "compute"
    SEND = "send"
    REDUCE = "reduce"


class Span(NamedTuple):
    """An action on one rank. An action of a stage with several ranks has one span on each.

    Args:
        rank: rank that ran the action.
        lane: lane on which it ran.
        action: the action.
        start_s: start, from the start of the step.
        end_s: end, from the start of the step.
    """

    rank: int
    lane: Lane
    action: Action
    start_s: float
    end_s: float


class Message(NamedTuple):
    """One message between two ranks.

    Args:
        row: number of the transfer row.
        edge: edge of the model, or the module if the message goes between two of its stages.
        source_rank: rank that sends.
        destination_rank: rank that receives.
        num_bytes: bytes on the link.
        ready_s: end of the producing action.
        start_s: start of the transfer on the link.
        end_s: arrival.
    """

    row: int
    edge: str
    source_rank: int
    destination_rank: int
    num_bytes: int
    ready_s: float
    start_s: float
    end_s: float


class MemorySample(NamedTuple):
    """Memory of a rank from `time_s` on.

    Args:
        rank: rank that holds the memory.
        time_s: time from the start of the step.
        num_bytes: bytes held until the next sample of the rank.
    """

    rank: int
    time_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Headline):
    """One simulated, executed or emulated step. Times are seconds from the start of the step.

    Args:
        plan_hash: hash of the plan.
        executor: what produced the trace.
        spans: actions, ordered by (rank, lane, start).
        messages: messages, ordered by row; transfers within a rank are not messages.
        memory: memory samples, ordered by (rank, time).
        loss: loss of the step, if executed.
        details: (name, value) pairs: versions, profile, unmeasured costs.
    """

    plan_hash: str
    executor: Executor
    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    loss: float | None = None
    details: tuple[tuple[str, str], ...] = ()

    @property
    def headline(self) -> str:
        """See `Headline`."""
        step = f"{1e3 * self.iteration_s:,.4g} ms, {len(self.spans):,} spans"
        return f"<Trace, {self.executor}: {step}, plan {self.plan_hash[:12]}>"

    @property
    def iteration_s(self) -> float:
        """End of the last span or message."""
        ends = [span.end_s for span in self.spans] + [message.end_s for message in self.messages]
        return max(ends, default=0.0)

    def order(self, rank: int) -> tuple[Action, ...]:
        """Compute actions of one rank in the order in which they started."""
        spans = [s for s in self.spans if s.rank == rank and s.lane is Lane.COMPUTE]
        return tuple(span.action for span in sorted(spans, key=lambda span: span.start_s))


def median_trace(traces: Sequence[Trace]) -> Trace:
    """The trace with the (lower) median iteration time."""
    return sorted(traces, key=lambda trace: trace.iteration_s)[(len(traces) - 1) // 2]
