"""What happened when: the one schema that simulator and runtime both return."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
    """An action on one rank. An action of a stage with several ranks has a span on each.

    Args:
        rank: that did it.
        lane: on which it ran.
        action: what was done.
        start_s: from the step's start.
        end_s: from the step's start.
    """

    rank: int
    lane: Lane
    action: Action
    start_s: float
    end_s: float


class Message(NamedTuple):
    """One transfer row: ready at its producer's end, on the link from `start_s`, there at `end_s`.

    Args:
        row: number of the transfer row.
        edge: of the model, or the module inside which it goes from stage to stage.
        source_rank: that sends.
        destination_rank: that receives.
        num_bytes: on the link.
        ready_s: end of the producer.
        start_s: on the link from then on.
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
    """Bytes held by a rank from `time_s` on.

    Args:
        rank: that holds them.
        time_s: from the step's start.
        num_bytes: held until the rank's next sample.
    """

    rank: int
    time_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One executed or simulated step. Times count from the step's start.

    Args:
        plan_hash: of the plan it belongs to.
        executor: who made it.
        spans: ordered by (rank, lane, start).
        messages: ordered by row; LOCAL rows are not messages.
        memory: ordered by (rank, time).
        loss: of the step, where executed.
        details: (name, value) pairs a reader may want: versions, profile, unmeasured costs.
    """

    plan_hash: str
    executor: Executor
    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    loss: float | None = None
    details: tuple[tuple[str, str], ...] = ()

    @property
    def iteration_s(self) -> float:
        """End of the last span or message."""
        ends = [span.end_s for span in self.spans] + [message.end_s for message in self.messages]
        return max(ends, default=0.0)

    def order(self, rank: int) -> tuple[Action, ...]:
        """Compute actions of one rank in the order in which they started."""
        spans = [s for s in self.spans if s.rank == rank and s.lane is Lane.COMPUTE]
        return tuple(span.action for span in sorted(spans, key=lambda span: span.start_s))
