"""Incumbents: the choices that candidates are made from, one for each layout and number of microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.search.joint.choice import Choice
from workbench.search.joint.move import Move
from workbench.search.joint.proposals import Proposals

MOST_INCUMBENTS = 16
HELD = 5  # of these, whose worst value a candidate has to beat to be worth a whole look
BEST_SHARE = 0.4  # of a round, for the best incumbent
OTHERS = 3  # incumbents that share the rest
OPTIMISM, PATIENCE = 0.3, 24  # the part of its value that one may gain, halved after so many candidates
NEAR = 1e-5  # of a value: as good as equal

Site = tuple[frozenset[tuple[str, tuple[tuple[int, ...], ...]]], int]


@dataclass(slots=True, eq=False)
class Incumbent:
    """A choice that candidates are made from.

    Args:
        value: of its plan.
        index: of the candidate that it was, or the name of a start.
        start: whose plan it comes from.
        batches_s: steps of the batches that it was judged by; none: it was not by batches.
        tried: candidates made from it, those of the incumbent before it at the same site counting half.
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
    def optimistic(self) -> float:
        """An estimate of what its neighbourhood holds: the less it was searched, the lower."""
        return self.value * (1 - OPTIMISM / (1 + self.tried / PATIENCE))


def site_of(choice: Choice) -> Site:
    """Which grids of ranks each module lies on, and the number of microbatches of all modules.

    Either decides which orders and groupings are near: what is best in one number is seldom best in another.
    """
    return frozenset((stage.module, stage.ranks) for stage in choice.stages), len(choice.microbatches)


def admitted(incumbents: Sequence[Incumbent], taken: Incumbent) -> list[Incumbent] | None:
    """The incumbents with one more, best first; None where it is not worth one.

    It takes that of a worse choice at the same site, or of one that is as good as equal. A layout or a number
    of microbatches that is good with another grouping or order than that it was come by is so kept until
    these were tried, beside a better one that has them.
    """
    if len(incumbents) == MOST_INCUMBENTS and taken.value >= incumbents[-1].value:
        return None
    site = site_of(taken.choice)
    rivals = [
        incumbent
        for incumbent in incumbents
        if abs(incumbent.value - taken.value) <= NEAR * taken.value or site_of(incumbent.choice) == site
    ]
    if any(taken.value >= rival.value for rival in rivals):
        return None
    taken.tried = max((rival.tried // 2 for rival in rivals), default=0)
    kept = [incumbent for incumbent in incumbents if incumbent not in rivals]
    return sorted((*kept, taken), key=lambda incumbent: incumbent.value)[:MOST_INCUMBENTS]


def shares(incumbents: Sequence[Incumbent], count: int) -> Iterator[tuple[Incumbent, int]]:
    """How many of so many candidates are made from which: of the best, and of those that promise most."""
    best, *others = incumbents
    own = round(BEST_SHARE * count) if others else count
    yield best, own
    promising = sorted(others, key=lambda incumbent: incumbent.optimistic)[:OTHERS]
    for incumbent in promising:
        yield incumbent, -(-(count - own) // len(promising))
