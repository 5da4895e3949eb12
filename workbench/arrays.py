"""Array types, and index arithmetic on concatenated parts of unequal length."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def ints(values: Iterable[int]) -> Ints:
    """[values]"""
    return np.fromiter(values, np.int64)


def starts(lengths: Ints) -> Ints:
    """[parts] index at which each part starts."""
    return np.cumsum(lengths) - lengths


def spans(first: Ints, lengths: Ints) -> Ints:
    """[sum of lengths] the range first, first + 1, ... of each part."""
    return np.repeat(first - starts(lengths), lengths) + np.arange(lengths.sum())
