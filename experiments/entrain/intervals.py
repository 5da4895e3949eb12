"""Means and ratios with 95 % intervals that assume no distribution."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} .. {self.high:.3f})"


def bootstrap(values: Sequence[float]) -> Interval:
    """The interval of a mean by the percentile bootstrap.

    Source: Efron 1979, "Bootstrap Methods: Another Look at the Jackknife", percentile interval.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval wants >= 2 values, got {len(values)}")
    sample = np.asarray(values, float)
    indices = np.random.default_rng(0).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.percentile(sample[indices].mean(axis=1), (2.5, 97.5))
    return Interval(float(sample.mean()), float(low), float(high))


def ratio_of_medians(others: Sequence[Sequence[float]], own: Sequence[float]) -> Interval:
    """The ratio of the others' median time to `own`, with a bootstrap interval over rounds.

    A mean of ratios would be biased upwards by about the relative variance of `own`, and distorted by a
    single slow round.

    Args:
        others: [series][rounds] seconds; the mean of their medians counts.
        own: [rounds].

    Returns:
        The ratio (as `mean`) and the percentile interval of Efron 1979.

    Raises:
        ValueError: fewer than two rounds, or unequal numbers of them.
    """
    if len(own) < 2 or any(len(series) != len(own) for series in others):
        raise ValueError(
            f"want the same >= 2 rounds of all, got {[len(series) for series in (*others, own)]}"
        )
    table = np.asarray([*others, own], float)
    indices = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    medians = np.median(table[:, indices], axis=2)
    low, high = np.percentile(medians[:-1].mean(axis=0) / medians[-1], (2.5, 97.5))
    whole = np.median(table, axis=1)
    return Interval(float(whole[:-1].mean() / whole[-1]), float(low), float(high))
