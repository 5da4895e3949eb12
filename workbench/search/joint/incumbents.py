"""Incumbents: the choices that candidates are derived from, one per layout and number of microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

from workbench.search.joint.choice import Choice
from workbench.search.joint.move import Move
from workbench.search.joint.proposals import Proposals

MOST_INCUMBENTS = 16
HELD = 5  # a candidate must beat the worst of so many to be evaluated in full
BEST_SHARE = 0.4  # share of a round for the best incumbent
OTHERS = 3  # incumbents that share the rest
OPTIMISM, PATIENCE = 0.3, 24  # relative gain hoped for, halved after so many candidates
NEAR = 1e-5  # relative difference of values that count as equal

Site = tuple[frozenset[tuple[str, tuple[tuple[int, ...], ...]]], int]


@dataclass(slots=True, eq=False)
class Incumbent:
    """A choice that candidates are derived from.

    Args:
        value: of its plan.
        index: of the candidate that it was, or the name of a start.
        start: name of the start it was derived from.
        batches_s: steps on the batches it was judged by; empty: not judged by batches.
        effort: of judging it, as in `Outcome`.
        tried: effort of the candidates derived from it, in candidates of the best incumbent; that of the
            previous incumbent at the same site counts half.
        proposals: moves from it; None: not requested yet.
        first: moves that improved another incumbent.
    """

    value: float
    choice: Choice
    index: int | str
    start: str
    batches_s: tuple[float, ...] = ()
    effort: float = 1.0
    tried: float = 0.0
    proposals: Proposals | None = None
    first: tuple[Move, ...] = ()
    site: Site = field(init=False)

    def __post_init__(self) -> None:
        self.site = site_of(self.choice)

    @property
    def optimistic(self) -> float:
        """Optimistic estimate of its neighbourhood's best value: the less it was searched, the lower."""
        return self.value * (1 - OPTIMISM / (1 + self.tried / PATIENCE))


def site_of(choice: Choice) -> Site:
    """The grids of ranks of each module, and the number of microbatches of all modules.

    Either decides which orders and groupings are near: what is best in one number is seldom best in another.
    """
    return frozenset((stage.module, stage.ranks) for stage in choice.stages), len(choice.microbatches)


def admitted(incumbents: Sequence[Incumbent], candidate: Incumbent) -> list[Incumbent] | None:
    """The incumbents with a candidate added, best first; None if it is not admitted.

    It replaces a worse incumbent at the same site, or one of nearly equal value. So a layout or number of
    microbatches that needs another grouping or order to be good is kept until these were tried, beside a
    better incumbent that already has them.
    """
    if len(incumbents) == MOST_INCUMBENTS and candidate.value >= incumbents[-1].value:
        return None
    rivals = [
        incumbent
        for incumbent in incumbents
        if abs(incumbent.value - candidate.value) <= NEAR * candidate.value
        or incumbent.site == candidate.site
    ]
    if any(candidate.value >= rival.value for rival in rivals):
        return None
    candidate.tried = max((rival.tried / 2 for rival in rivals), default=0.0)
    kept = [incumbent for incumbent in incumbents if incumbent not in rivals]
    return sorted((*kept, candidate), key=lambda incumbent: incumbent.value)[:MOST_INCUMBENTS]


def shares(incumbents: Sequence[Incumbent], count: int) -> Iterator[tuple[Incumbent, int]]:
    """How many of `count` candidates to derive from which: the best incumbent and the most promising ones.

    Those whose plans take more effort to judge than the best one's get fewer, and at least one.
    """
    best, *others = incumbents
    best_count = round(BEST_SHARE * count) if others else count
    yield best, best_count
    promising = sorted(others, key=lambda incumbent: incumbent.optimistic)[:OTHERS]
    for incumbent in promising:
        growth = max(1.0, incumbent.effort / best.effort)
        yield incumbent, ceil((count - best_count) / len(promising) / growth)
