"""Reading a table of measured rates between its points."""

from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_NEIGHBOURS = 6
SLACK = 1e-6  # of distances, more than what is rounded
HALVED = 64  # cells, until what no reading is above is taken as it is
NARROW = 1 / 64  # octaves, of a cell that is not halved
_Line = tuple[NDArray[np.float64], NDArray[np.float64]]


class Reading(NamedTuple):
    """A rate read from a table, and whether it was asked for inside the measured box."""

    rate: float
    inside: bool


class Cell(NamedTuple):
    """A part of a surface's box, in logarithms.

    Args:
        low, high: corners.
        most: what no reading in it is above.
        near: places of the points that can be among the nearest there.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    most: float
    near: NDArray[np.intp]

    @property
    def most_rate(self) -> float:
        """What no reading in it is above, as a rate."""
        return float(np.exp2(self.most))


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
        self._most: dict[tuple[tuple[float, ...], tuple[float, ...]], float] = {}

    @cached_property
    def low(self) -> tuple[float, ...]:
        """Smallest measured value of every coordinate."""
        return tuple(float(value) for value in np.exp2(self._low))

    @cached_property
    def high(self) -> tuple[float, ...]:
        """Largest measured value of every coordinate."""
        return tuple(float(value) for value in np.exp2(self._high))

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """Least and most rate of all points, between which every reading lies."""
        return float(np.exp2(self._log_rate.min())), float(np.exp2(self._log_rate.max()))

    @cached_property
    def _line(self) -> _Line | None:
        """Of a surface over one coordinate."""
        return _line(self._coordinates, self._log_rate) if self._coordinates.shape[1] == 1 else None

    def read(self, *coordinates: float) -> Reading:
        """The rate at these coordinates."""
        found = self._known.get(coordinates)
        if found is None:
            asked = np.log2(np.asarray(coordinates, dtype=np.float64))
            at = np.minimum(np.maximum(asked, self._low), self._high)
            inside = bool(np.maximum.reduce(np.abs(asked - at)) < 1e-9)
            if self._line is None:
                log_rate = _shepard(np.add.reduce(np.abs(self._coordinates - at), axis=1), self._log_rate)
            else:
                log_rate = _on_line(self._line, at)
            found = Reading(float(np.exp2(log_rate)), inside)
            self._known[coordinates] = found
        return found

    def most(self, low: Sequence[float], high: Sequence[float]) -> float:
        """What no reading between two corners is above.

        A reading in a cell is held against the points that can be among the nearest there: a point is not
        where six others are nearer from everywhere in it. A reading is a mean of its nearest points; that is
        most where those of higher rates weigh as much as they can in the cell, and the others as little. The
        cell of which most is not known to be less is halved, so many times. Over one coordinate: the highest
        point.

        Args:
            low, high: corners, in each coordinate 0 < low <= high.

        Complexity: O(N log N) for every cell, of which there are at most 2 x `HALVED` + 1.
        """
        if self._coordinates.shape[1] == 1:
            return self.extremes[1]
        key = tuple(low), tuple(high)
        if key not in self._most:
            first, last = (np.clip(np.log2(np.asarray(at, float)), self._low, self._high) for at in key)
            self._most[key] = float(np.exp2(self._most_between(first, last)))
        return self._most[key]

    def cell(self, low: Sequence[float], high: Sequence[float], within: Cell | None = None) -> Cell:
        """What lies between two corners, by one look: nothing is halved, as `most` does.

        Args:
            within: a cell around it, whose points alone are looked at.
        """
        first, last = (np.clip(np.log2(np.asarray(at, float)), self._low, self._high) for at in (low, high))
        return self._cell(first, last, within)

    def _most_between(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> float:
        """The same, all in logarithms."""
        cells = [(0.0, 0, self._cell(low, high, None))]
        for number in range(1, 2 * HALVED, 2):
            _, _, cell = cells[0]
            axis = int(np.argmax(cell.high - cell.low))
            if cell.high[axis] - cell.low[axis] < NARROW:
                break
            heappop(cells)
            middle = (cell.low[axis] + cell.high[axis]) / 2
            for index, (first, last) in enumerate(
                ((cell.low, cell.high.copy()), (cell.low.copy(), cell.high))
            ):
                (last if index == 0 else first)[axis] = middle
                half = self._cell(first, last, cell)
                heappush(cells, (-half.most, number + index, half))
        return cells[0][2].most

    def _cell(self, low: NDArray[np.float64], high: NDArray[np.float64], within: Cell | None) -> Cell:
        places = np.arange(len(self._log_rate)) if within is None else within.near
        points, rates = self._coordinates[places], self._log_rate[places]
        nearest = np.maximum(np.maximum(low - points, points - high), 0.0).sum(axis=1)
        farthest = np.maximum(np.abs(points - low), np.abs(points - high)).sum(axis=1)
        last = min(NUM_NEIGHBOURS, len(rates)) - 1
        can_be = nearest <= np.partition(farthest, last)[last] + SLACK
        is_always = farthest[can_be] <= np.partition(nearest, last)[last] - SLACK
        rates, nearest, farthest = rates[can_be], nearest[can_be], farthest[can_be]
        order = np.argsort(-rates, kind="stable")
        most = (np.maximum(nearest, SLACK) ** -2.0)[order]
        least = np.where(is_always, np.maximum(farthest, SLACK) ** -2.0, 0.0)[order]
        rates = rates[order]
        weights = np.cumsum(most) + least.sum() - np.cumsum(least)
        sums = np.cumsum(most * rates) + (least * rates).sum() - np.cumsum(least * rates)
        exact = rates[nearest[order] < SLACK]
        found = float(max((sums / weights).max(), exact.max(initial=-np.inf)))
        if within is not None:
            found = min(found, within.most)
        return Cell(low, high, found, places[can_be])

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
        for position, index in enumerate(folds):
            kept[index] = False
            at = self._coordinates[index]
            predicted = _between(self._coordinates[kept], self._log_rate[kept], at)
            errors[position] = abs(np.exp2(predicted - self._log_rate[index]) - 1)
            kept[index] = True
        return float(np.median(errors)), float(np.quantile(errors, 0.9))


def _between(coordinates: NDArray[np.float64], value: NDArray[np.float64], at: NDArray[np.float64]) -> float:
    if coordinates.shape[1] > 1:
        return _shepard(np.abs(coordinates - at).sum(axis=1), value)
    return _on_line(_line(coordinates, value), at)


def _line(coordinates: NDArray[np.float64], value: NDArray[np.float64]) -> _Line:
    """Over one coordinate: the places, ascending, and the mean of the values at each."""
    places, inverse = np.unique(coordinates[:, 0], return_inverse=True)
    return places, np.bincount(inverse, weights=value) / np.bincount(inverse)


def _on_line(line: _Line, at: NDArray[np.float64]) -> float:
    return float(np.interp(at[0], *line))


def _shepard(distance: NDArray[np.float64], value: NDArray[np.float64]) -> float:
    """By ufuncs themselves: `sum` and its like are Python around them, which takes most of a reading."""
    nearest = min(NUM_NEIGHBOURS, int(np.count_nonzero(np.isfinite(distance)))) - 1
    ascending = distance.copy()
    ascending.partition(nearest)
    near = distance <= float(ascending[nearest]) + 1e-9
    distance, value = distance[near], value[near]
    exact = distance < 1e-9
    if np.count_nonzero(exact):
        return float(value[exact].mean())
    weight = distance**-2.0
    return float(np.add.reduce(weight * value) / np.add.reduce(weight))
