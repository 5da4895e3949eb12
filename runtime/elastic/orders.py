"""Orders of a supervisor to its processes, and their replies.

Messages are small, so that a full pipe never blocks either side; plans and states are passed as files.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

from runtime.elastic.moves import Move, Owner
from workbench.schedule.action import MEANING, Activity, Pass


class Moment(IntEnum):
    """Activity of a process, which it writes to memory that its supervisor can read."""

    IDLE = 0
    GROUPS = 1
    COPYING = 2
    FORWARD = 3
    BACKWARD = 4
    REDUCING = 5
    VOTED = 6
    GATHERING = 7


def moment_of(kind: Pass) -> Moment:
    """Activity of a process during an action of its program."""
    meaning = MEANING[kind]
    if meaning.weights:
        return Moment.GATHERING
    if meaning.activity is not Activity.COMPUTE:
        return Moment.REDUCING
    return Moment.FORWARD if kind is Pass.F else Moment.BACKWARD


class Order(Enum):
    """Orders without content."""

    COMMIT = "commit"  # all gradients are complete: update the weights
    PAUSE = "pause"  # drop everything but weights and moments, and reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Form a world and receive missing layers.

    Args:
        rendezvous: file in which ranks publish their addresses, new for every attempt.
        rank: of this process.
        plan: file with the pickled lowered plan of some step on the new layout.
        step: optimizer steps that all kept state has seen.
        moves: between ranks of the new world.
        start: origin of the state when no process has any: a checkpoint, or None for the seed.
    """

    rendezvous: Path
    rank: int
    plan: Path
    step: int
    moves: tuple[Move, ...]
    is_first: bool
    start: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Receive layers within the current world, before some of its ranks leave it."""

    plan: Path
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Run the step until gradients are complete, vote, and wait for the commit."""

    step: int
    plan: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write these layers to a new folder.

    Args:
        number: of the save, repeated in the reply.
    """

    number: int
    folder: Path
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The world is formed, and layers have arrived."""

    groups_s: float
    copying_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Layers have arrived."""

    copying_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Gradients are complete; `loss` is this rank's part."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """An order failed; the cause may be another rank."""

    text: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Stopped, with state that has seen `step` optimizer steps; None: without state."""

    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The reply to a `Save`: written, or the problem why not.

    A process with a full disk is not broken: it continues training.
    """

    number: int
    problem: str | None = None


Reply = Ready | Fetched | Vote | Broken | Paused | Saved
