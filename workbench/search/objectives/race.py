"""What steps of some batches say about those of others, by plans that were judged by all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean

MARGIN = 2.0  # standard deviations of what is foretold: of normal ones, 2.3 % are less


@dataclass(frozen=True, slots=True)
class Race:
    """How long each batch's step is beside the others', and how far plans differ in that.

    Plans are compared on the same batches (common random numbers): what a batch is longer or shorter for all
    plans says nothing about one of them. A plan's unseen steps are foretold from its seen ones as in a
    two-way table without interaction, [plans, batches], of logarithms of seconds; the margin covers what
    such a table leaves over. So a plan whose unseen steps are much shorter than its seen ones foretell may
    be missed, about one of forty of those that are just as good as the limit, and more where few plans are
    known or a plan differs from those in which batches are long for it.

    Args:
        shares: logarithm of each batch's step over the geometric mean of all.
        spread: standard deviation of what is left over.
    """

    shares: tuple[float, ...]
    spread: float

    def others_s(self, seen_s: Sequence[float]) -> list[float]:
        """Of the batches behind the first ones: seconds that their steps hardly fall short of.

        Args:
            seen_s: steps of the first batches, one at least; all positive.
        """
        num = len(seen_s)
        own = fmean(log(step_s) - share for step_s, share in zip(seen_s, self.shares[:num], strict=True))
        margin = MARGIN * self.spread * sqrt(1 + 1 / num)
        return [exp(own + share - margin) for share in self.shares[num:]]


def race_of(batches_s: Sequence[Sequence[float]]) -> Race | None:
    """By plans' steps, [plans, batches]; None where these are fewer than two plans or batches."""
    rows = [[log(step_s) for step_s in row] for row in batches_s if len(row) > 1]
    if len(rows) < 2:
        return None
    rows = [[each - fmean(row) for each in row] for row in rows]
    shares = tuple(map(fmean, zip(*rows, strict=True)))
    squares = sum((each - share) ** 2 for row in rows for each, share in zip(row, shares, strict=True))
    return Race(shares, sqrt(squares / ((len(rows) - 1) * (len(shares) - 1))))
