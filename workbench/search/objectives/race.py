"""Predict a plan's steps on unseen batches from its seen ones, by plans that were judged on all batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean

from workbench.float_sum import float_sum

MARGIN = 2.0  # standard deviations of a prediction: 2.3 % of a normal distribution are below


@dataclass(frozen=True, slots=True)
class Race:
    """How long each batch's step is relative to the others', and how much plans differ in that.

    Plans are compared on the same batches (common random numbers): that a batch takes longer for all plans
    says nothing about one of them. A plan's unseen steps are predicted from its seen ones as in a two-way
    table without interaction, [plans, batches], of logarithms of seconds; the margin covers the residuals
    of such a table. So a plan whose unseen steps are much shorter than predicted may be missed: about one
    in forty of those just as good as the limit, and more if few plans are known or the plan differs from
    them in which batches are long.

    Args:
        shares: logarithm of each batch's step over the geometric mean of all.
        spread: standard deviation of the residuals.
    """

    shares: tuple[float, ...]
    spread: float

    def others_s(self, seen_s: Sequence[float]) -> list[float]:
        """Seconds that the steps of the remaining batches are unlikely to fall below.

        Args:
            seen_s: steps of the first batches, at least one; all positive.
        """
        num_seen = len(seen_s)
        plan_mean = fmean(
            log(step_s) - share for step_s, share in zip(seen_s, self.shares[:num_seen], strict=True)
        )
        margin = MARGIN * self.spread * sqrt(1 + 1 / num_seen)
        return [exp(plan_mean + share - margin) for share in self.shares[num_seen:]]


def race_of(batches_s: Sequence[Sequence[float]]) -> Race | None:
    """Fit to plans' steps, [plans, batches]; None for fewer than two plans or batches."""
    rows = [[log(step_s) for step_s in row] for row in batches_s if len(row) > 1]
    if len(rows) < 2:
        return None
    rows = [[value - fmean(row) for value in row] for row in rows]
    shares = tuple(map(fmean, zip(*rows, strict=True)))
    squared_residuals = float_sum(
        (value - share) ** 2 for row in rows for value, share in zip(row, shares, strict=True)
    )
    return Race(shares, sqrt(squared_residuals / ((len(rows) - 1) * (len(shares) - 1))))
