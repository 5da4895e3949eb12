"""Reading a table of measured rates between its points."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_NEIGHBOURS = 6


class Reading(NamedTuple):
    """A rate read from a table, and whether it was asked for inside the measured box."""

    rate: float
    inside: bool


class Surface:
    """Rates over positive coordinates, interpolated in log space; measured points come back exactly.

    Over one coordinate: a straight line between the two neighbours. Over several: inverse
    squared distance over the six nearest points (Shepard 1968, "A two-dimensional
    interpolation function for irregularly-spaced data", ACM national conference), all
    points at the sixth distance included, so that the order of points does not matter.
    Coordinates outside the box of the points are moved to its face.

    Args:
        points: [N] tuples (coordinate, ..., rate), all > 0.

    Complexity: O(N) a reading; equal readings are computed once.
    """

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        table = np.log2(np.asarray(points, dtype=np.float64))
        self._coordinates: NDArray[np.float64] = table[:, :-1]
        self._log_rate: NDArray[np.float64] = table[:, -1]
        self._low: NDArray[np.float64] = self._coordinates.min(axis=0)
        self._high: NDArray[np.float64] = self._coordinates.max(axis=0)
        self._known: dict[tuple[float, ...], Reading] = {}

    @property
    def low(self) -> tuple[float, ...]:
        """Smallest measured value of every coordinate."""
        return tuple(float(value) for value in np.exp2(self._low))

    @property
    def high(self) -> tuple[float, ...]:
        """Largest measured value of every coordinate."""
        return tuple(float(value) for value in np.exp2(self._high))

    @property
    def extremes(self) -> tuple[float, float]:
        """Least and most rate of all points, between which every reading lies."""
        return float(np.exp2(self._log_rate.min())), float(np.exp2(self._log_rate.max()))

    def read(self, *coordinates: float) -> Reading:
        """The rate at these coordinates."""
        found = self._known.get(coordinates)
        if found is None:
            asked = np.log2(np.asarray(coordinates, dtype=np.float64))
            at = np.clip(asked, self._low, self._high)
            inside = bool(np.abs(asked - at).max() < 1e-9)
            found = Reading(float(np.exp2(_between(self._coordinates, self._log_rate, at))), inside)
            self._known[coordinates] = found
        return found

    def leave_one_out(self) -> tuple[float, float]:
        """Median and 90th percentile of |relative error| when each point is predicted by the others.

        Over one coordinate the first and the last point are left in: the others do not enclose them.

        Raises:
            ValueError: fewer than two points, or three over one coordinate.

        Complexity: O(N^2).
        """
        order = np.argsort(self._coordinates[:, 0], kind="stable")
        folds = order[1:-1] if self._coordinates.shape[1] == 1 else order
        if len(order) < 2 or not len(folds):
            raise ValueError(f"leave-one-out wants at least two points, or three in a line, got {len(order)}")
        kept = np.ones(len(order), dtype=bool)
        errors = np.empty(len(folds))
        for place, index in enumerate(folds):
            kept[index] = False
            at = self._coordinates[index]
            predicted = _between(self._coordinates[kept], self._log_rate[kept], at)
            errors[place] = abs(np.exp2(predicted - self._log_rate[index]) - 1)
            kept[index] = True
        return float(np.median(errors)), float(np.quantile(errors, 0.9))


def _between(coordinates: NDArray[np.float64], value: NDArray[np.float64], at: NDArray[np.float64]) -> float:
    if coordinates.shape[1] > 1:
        return _shepard(np.abs(coordinates - at).sum(axis=1), value)
    places, inverse = np.unique(coordinates[:, 0], return_inverse=True)
    means = np.bincount(inverse, weights=value) / np.bincount(inverse)
    return float(np.interp(at[0], places, means))


def _shepard(distance: NDArray[np.float64], value: NDArray[np.float64]) -> float:
    nearest = min(NUM_NEIGHBOURS, int(np.isfinite(distance).sum())) - 1
    radius = float(np.partition(distance, nearest)[nearest])
    near = distance <= radius + 1e-9
    distance, value = distance[near], value[near]
    exact = distance < 1e-9
    if exact.any():
        return float(value[exact].mean())
    weight = distance**-2.0
    return float((weight * value).sum() / weight.sum())
