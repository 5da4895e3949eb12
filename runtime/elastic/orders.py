"""What a supervisor orders its processes to do, and what they answer.

Messages are small, so that neither side can be blocked by a full pipe; plans and states travel as files.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

from runtime.elastic.moves import Move, Owner
from workbench.schedule.action import MEANING, Activity, Pass


class Moment(IntEnum):
    """What a process is doing; it writes it where its supervisor can read it."""

    IDLE = 0
    GROUPS = 1
    COPYING = 2
    FORWARD = 3
    BACKWARD = 4
    REDUCING = 5
    VOTED = 6
    GATHERING = 7


def moment_of(kind: Pass) -> Moment:
    """What a process is doing while it does an action of its program."""
    meaning = MEANING[kind]
    if meaning.weights:
        return Moment.GATHERING
    if meaning.activity is not Activity.COMPUTE:
        return Moment.REDUCING
    return Moment.FORWARD if kind is Pass.F else Moment.BACKWARD


class Order(Enum):
    """Orders without content."""

    COMMIT = "commit"  # all gradients are whole: take the step
    PAUSE = "pause"  # drop everything but weights and moments, and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Form a world, get the layers that are missing.

    Args:
        rendezvous: file, new for every attempt, where the ranks leave their addresses.
        rank: of this process.
        plan: file of the pickled lowered plan of a step on the new layout; the next one's, or another's.
        step: optimizer steps that all held state has seen.
        moves: between ranks of the new world.
        start: where state comes from when nobody holds any: a checkpoint, or None for the seed.
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
    """Get layers within the world that there is, before some of its ranks leave it."""

    plan: Path
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Run the step up to whole gradients, vote, wait for the commit."""

    step: int
    plan: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write these layers to a new folder.

    Args:
        number: of the save, which the answer repeats.
    """

    number: int
    folder: Path
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """World and layers are there."""

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
    """Gradients are whole; `loss` is this rank's part."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Something failed; the cause may be another rank."""

    text: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Stopped, with state that has seen that many optimizer steps; None: holds nothing."""

    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The answer to a `Save`: written, or why it could not be.

    A process whose disk is full is not broken: it trains on.
    """

    number: int
    problem: str | None = None


Told = Ready | Fetched | Vote | Broken | Paused | Saved
