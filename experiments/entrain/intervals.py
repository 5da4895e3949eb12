"""Means with 95 % intervals that assume no distribution."""

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


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Of the mean, by the percentiles of means of values drawn again with replacement.

    Source: Efron 1979, "Bootstrap Methods: Another Look at the Jackknife", percentile interval.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval wants >= 2 values, got {len(values)}")
    taken = np.asarray(values, float)
    places = np.random.default_rng(seed).integers(len(taken), size=(RESAMPLES, len(taken)))
    low, high = np.percentile(taken[places].mean(axis=1), (2.5, 97.5))
    return Interval(float(taken.mean()), float(low), float(high))
