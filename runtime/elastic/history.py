"""History of an elastic training: its steps, and its recoveries from changes of nodes."""

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why the layout changed; a loss may also admit new nodes, and a start lose some."""

    START = "start"
    LOSS = "loss"
    WARNING = "warning"
    JOIN = "join"


class ElasticFailed(RuntimeError):  # noqa: N818  (the name says what happened)
    """Training cannot continue, for a reason that no new layout would solve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A completed step, with the sizes of its pipelines."""

    step: int
    loss: float
    end_s: float  # on the machine's monotonic clock
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshaped:
    """One change of the layout, from the first sign of it to all ranks being ready for the next step.

    Args:
        step: the next one; after a loss, the one that was aborted.
        attempts: 1, and 1 more for every time the recovery itself was interrupted.
        noticed_s, stopped_s, ready_s: on the machine's monotonic clock. After a warning or a join, nothing
            has to be stopped.
        planning_s: until the ranks have their orders: new layout, copies, a plan and its lowering.
        is_prepared: whether all this was planned ahead and only looked up; of the last attempt, as are
        groups_s, copying_s: the slowest rank's.
        num_bytes: that were copied.
    """

    step: int
    cause: Cause
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    attempts: int
    noticed_s: float
    stopped_s: float
    ready_s: float
    planning_s: float
    groups_s: float
    copying_s: float
    num_bytes: int
    sizes: tuple[int, ...]
    is_prepared: bool = False

    @property
    def recovery_s(self) -> float:
        return self.ready_s - self.noticed_s
