"""Means and ratios with 95 % intervals that assume no distribution."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} .. {self.high:.3f})"


def bootstrap(values: Sequence[float]) -> Interval:
    """Of the mean, by the percentiles of means of values drawn again with replacement.

    Source: Efron 1979, "Bootstrap Methods: Another Look at the Jackknife", percentile interval.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval wants >= 2 values, got {len(values)}")
    taken = np.asarray(values, float)
    places = np.random.default_rng(0).integers(len(taken), size=(RESAMPLES, len(taken)))
    low, high = np.percentile(taken[places].mean(axis=1), (2.5, 97.5))
    return Interval(float(taken.mean()), float(low), float(high))


def ratio_of_medians(others: Sequence[Sequence[float]], own: Sequence[float]) -> Interval:
    """How many times as long the others take, by medians over rounds; rounds are drawn again.

    A mean of ratios would be too large by about the relative variance of `own`, and one slow round
    would move it.

    Args:
        others: [series][rounds] seconds; the mean of their medians counts.
        own: [rounds].

    Returns:
        The ratio (as `mean`) and the percentile interval of Efron 1979.

    Raises:
        ValueError: fewer than two rounds, or unequal numbers of them.
    """
    if len(own) < 2 or any(len(each) != len(own) for each in others):
        raise ValueError(f"want the same >= 2 rounds of all, got {[len(each) for each in (*others, own)]}")
    table = np.asarray([*others, own], float)
    places = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    medians = np.median(table[:, places], axis=2)
    low, high = np.percentile(medians[:-1].mean(axis=0) / medians[-1], (2.5, 97.5))
    whole = np.median(table, axis=1)
    return Interval(float(whole[:-1].mean() / whole[-1]), float(low), float(high))
