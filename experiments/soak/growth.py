"""Growth rates, with intervals that account for autocorrelation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WARM_SHARE = 0.25  # of the samples: caches fill, allocators settle
BLOCK_SHARE = 0.1  # of the rest, that stay together when they are drawn
DRAWS = 500
LEVEL = 0.95
PER = 1000
SMALL_SHARE = 0.002  # of a value, per 1,000, that is no leak anybody meets

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth per 1,000 steps or requests, with its 95 % interval.

    Args:
        level: median of the samples.
    """

    per_1000: float
    low: float
    high: float
    level: float

    @property
    def is_flat(self) -> bool:
        """Whether the interval includes no growth, or only negligible growth."""
        return self.low <= 0 or self.high <= SMALL_SHARE * self.level


def theil_sen(x: Floats, y: Floats) -> float:
    """The median of the slopes of all pairs, which is robust to a few jumps of an allocator.

    Theil 1950, "A rank-invariant method of linear and polynomial regression analysis"; Sen 1968.
    Complexity: O(n^2) for n samples.
    """
    above = np.triu_indices(len(x), 1)
    return float(np.median((y[above[1]] - y[above[0]]) / (x[above[1]] - x[above[0]])))


def growth(done: Sequence[int], values: Sequence[float]) -> Growth:
    """The growth of samples after the warm-up.

    The interval is a moving-block bootstrap of the residuals (Kunsch 1989, Annals of Statistics 17(3)), since
    memory is autocorrelated, while Theil and Sen's own interval assumes independence.

    Raises:
        ValueError: fewer than eight samples remain.
    """
    begin = int(len(done) * WARM_SHARE)
    x, y = np.array(done[begin:], float), np.array(values[begin:], float)
    if len(x) < 8:
        raise ValueError(f"growth: want at least 8 samples after the warm ones, got {len(x)}")
    slope = theil_sen(x, y)
    fitted = np.median(y - slope * x) + slope * x
    residuals = y - fitted
    size = max(2, int(len(x) * BLOCK_SHARE))
    rng = np.random.default_rng(0)
    slopes = [theil_sen(x, fitted + _drawn(residuals, size, rng)) for _ in range(DRAWS)]
    low, high = np.quantile(slopes, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Growth(
        per_1000=PER * slope, low=PER * float(low), high=PER * float(high), level=float(np.median(y))
    )


def _drawn(residuals: Floats, size: int, rng: np.random.Generator) -> Floats:
    starts = rng.integers(0, len(residuals) - size + 1, -(-len(residuals) // size))
    pieces = [residuals[start : start + size] for start in starts]
    return np.concatenate(pieces)[: len(residuals)]
