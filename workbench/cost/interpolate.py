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

    Inverse squared distance over the six nearest points (Shepard 1968, "A two-dimensional
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

    def read(self, *coordinates: float) -> Reading:
        """The rate at these coordinates."""
        found = self._known.get(coordinates)
        if found is None:
            asked = np.log2(np.asarray(coordinates, dtype=np.float64))
            at = np.clip(asked, self._low, self._high)
            inside = bool(np.abs(asked - at).max() < 1e-9)
            distance = np.abs(self._coordinates - at).sum(axis=1)
            found = Reading(float(np.exp2(_shepard(distance, self._log_rate))), inside)
            self._known[coordinates] = found
        return found

    def leave_one_out(self) -> tuple[float, float]:
        """Median and 90th percentile of |relative error| when each point is predicted by the others.

        Complexity: O(N^2).
        """
        if len(self._log_rate) < 2:
            raise ValueError("leave-one-out wants at least two points, got one")
        errors = np.empty(len(self._log_rate))
        for index, at in enumerate(self._coordinates):
            distance = np.abs(self._coordinates - at).sum(axis=1)
            distance[index] = np.inf
            errors[index] = abs(np.exp2(_shepard(distance, self._log_rate) - self._log_rate[index]) - 1)
        return float(np.median(errors)), float(np.quantile(errors, 0.9))


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
