"""Choices that candidates are made from: of all places and batchings the best, by what they promise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.search.joint.choice import Choice
from workbench.search.joint.move import Move
from workbench.search.joint.proposals import Proposals

SEATS = 16
HELD = 5  # of these, whose worst value a candidate has to beat to be worth a whole look
BEST_SHARE = 0.4  # of a round, for the best seat
OTHERS = 3  # seats that share the rest
HOPE, PATIENCE = 0.3, 24  # what a seat may still gain, halved after so many candidates
NEAR = 1e-5  # of a value: as good as equal

Site = tuple[frozenset[tuple[str, tuple[tuple[int, ...], ...]]], int]


@dataclass(slots=True, eq=False)
class Seat:
    """A choice that candidates are made from.

    Args:
        value: of its plan.
        index: of the candidate that it was, or the name of a start.
        start: whose plan it comes from.
        batches_s: steps of the batches that it was judged by; none: it was not by batches.
        tried: candidates made from it, those of the seat before it at the same site counting half.
        proposals: moves from it; None: it was not asked yet.
        first: moves that gained something elsewhere.
    """

    value: float
    choice: Choice
    index: int | str
    start: str
    batches_s: tuple[float, ...] = ()
    tried: int = 0
    proposals: Proposals | None = None
    first: tuple[Move, ...] = ()

    @property
    def hoped(self) -> float:
        """What it may come to: less than its value, the fewer candidates it had the more."""
        return self.value * (1 - HOPE / (1 + self.tried / PATIENCE))


def site_of(choice: Choice) -> Site:
    """Which grids of ranks each module lies on, and the number of microbatches of all modules.

    Either decides which orders and groupings are near: what is best in one number is seldom best in another.
    """
    return frozenset((stage.module, stage.ranks) for stage in choice.stages), len(choice.microbatches)


def seated(seats: Sequence[Seat], taken: Seat) -> list[Seat] | None:
    """The seats with one more, best first; None where it is not worth one.

    It takes that of a worse choice at the same site, or of one that is as good as equal. A layout or a number
    of microbatches that is good with another grouping or order than that it was come by is so kept until
    these were tried, beside a better one that has them.
    """
    if len(seats) == SEATS and taken.value >= seats[-1].value:
        return None
    site = site_of(taken.choice)
    rivals = [
        seat
        for seat in seats
        if abs(seat.value - taken.value) <= NEAR * taken.value or site_of(seat.choice) == site
    ]
    if any(taken.value >= rival.value for rival in rivals):
        return None
    taken.tried = max((rival.tried // 2 for rival in rivals), default=0)
    kept = [seat for seat in seats if seat not in rivals]
    return sorted((*kept, taken), key=lambda seat: seat.value)[:SEATS]


def shares(seats: Sequence[Seat], count: int) -> Iterator[tuple[Seat, int]]:
    """How many of so many candidates are made from which: of the best, and of those that promise most."""
    best, *others = seats
    own = round(BEST_SHARE * count) if others else count
    yield best, own
    hopeful = sorted(others, key=lambda seat: seat.hoped)[:OTHERS]
    for seat in hopeful:
        yield seat, -(-(count - own) // len(hopeful))
