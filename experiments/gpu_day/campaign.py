"""The campaign: its parts, the cells that each measures one by one, and its extent."""

import difflib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

FEWEST_S, MOST_S = 1.0, 86_400.0  # of a cell


class Extent(StrEnum):
    """How much: what a GPU is asked, or the same on tiny sizes, to see that all of it works."""

    FULL = "full"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Session:
    """What every measurement needs to know.

    Args:
        device: "cpu" or "cuda".
        extent: how much of each part.
        folder: where the rows are; a part may read those of another there.
    """

    device: str
    extent: Extent
    folder: Path


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement, done as a whole or not at all.

    Args:
        key: names it, the same in every call.
        bound_s: most seconds that it may take; then its process is ended.
    """

    key: str
    bound_s: float = 120.0

    def __post_init__(self) -> None:
        if not FEWEST_S <= self.bound_s <= MOST_S:
            raise ValueError(f"cell {self.key!r}: bound must be 1 s to a day, got {self.bound_s}")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a cell gives.

    Args:
        values: what is kept, as JSON has it.
        note: of a few words, shown while the campaign runs.
        merit: the more, the better; the best note of a part stays in sight. None: no such thing.
    """

    values: dict[str, Any]
    note: str = ""
    merit: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the campaign.

    Args:
        name: of its file and on the command line.
        module: with `cells(session)`, the cells in order, and `measure(session, key)`; imported only
            in the process that measures.
        claim: what it shows.
        needs: parts whose rows it starts from.
    """

    name: str
    module: str
    claim: str
    needs: tuple[str, ...] = field(default=())


PARTS = (
    Part(
        "environment", "experiments.gpu_day.environment", "software, device, ceilings of copies and products"
    ),
    Part("correctness", "experiments.gpu_day.correctness", "attention kernels against float64"),
    Part(
        "kernels", "experiments.gpu_day.kernels", "attention kernels against FlexAttention, cuDNN and flash"
    ),
    Part("layers", "experiments.gpu_day.layers", "layers and the executor, for predictions of plans"),
    Part("plans", "experiments.gpu_day.plans", "plans predicted, then executed", needs=("layers",)),
    Part("alone", "experiments.gpu_day.alone", "one rank: peak memory of plans, a world of one"),
    Part(
        "operators", "experiments.gpu_day.operators", "products, attention, copies for the device's profile"
    ),
)

MISSING = (
    "messages and collectives between GPUs",
    "overlap of passes with communication, and contention of links",
    "recovery from a rank that dies among ranks on NCCL",
    "plans executed with a GPU for every rank",
)


def part_named(name: str, parts: tuple[Part, ...] = PARTS) -> Part:
    """The part of that name.

    Raises:
        ValueError: there is none; the nearest is named.
    """
    names = [part.name for part in parts]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise ValueError(f"part {name!r}: want one of {', '.join(names)}; nearest: {near[0]}")
    return parts[names.index(name)]
