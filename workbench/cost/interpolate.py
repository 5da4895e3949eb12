"""Reading a table of measured rates between its points."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from heapq import heappop, heappush
from math import floor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.arrays import Floats

NUM_NEIGHBOURS = 6
SLACK = 1e-6  # of distances, more than what is rounded
HALVED = 64  # cells, until what no reading is above is taken as it is
NARROW = 1 / 64  # octaves, of a cell that is not halved
TIE = 1e-9  # of distances that count as equal
TOGETHER = 16  # cells beside one another, whose nearest points are sought at once
CUBES = (1.0, 0.25)  # octaves along each side, largest first, each a multiple of the next
_Line = tuple[Sequence[float], Sequence[float]]
_Samples = tuple[NDArray[np.float64], NDArray[np.float64]]


class Reading(NamedTuple):
    """A rate read from a table, and whether it was asked for inside the measured box."""

    rate: float
    inside: bool


class _Cell(NamedTuple):
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


class Surface:
    """Rates over positive coordinates, interpolated in log space; measured points come back exactly.

    Over one coordinate: a straight line between the two neighbours. Over several: inverse
    squared distance over the six nearest points (Shepard 1968, "A two-dimensional
    interpolation function for irregularly-spaced data", ACM national conference), all
    points at the sixth distance included, so that the order of points does not matter.
    Coordinates outside the box of the points are moved to its face.

    Args:
        points: [N] tuples (coordinate, ..., rate), all > 0.

    Complexity: equal readings are computed once. Over one coordinate O(log N). Over several O(points that
        can be among the nearest in the cube of a quarter octave around), and O(N) once for each cube.
    """

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        table = np.log2(np.asarray(points, dtype=np.float64))
        self._coordinates: NDArray[np.float64] = table[:, :-1]
        self._log_rate: NDArray[np.float64] = table[:, -1]
        self._low: NDArray[np.float64] = self._coordinates.min(axis=0)
        self._high: NDArray[np.float64] = self._coordinates.max(axis=0)
        self._box = tuple(zip(self._low.tolist(), self._high.tolist(), strict=True))
        self._near: dict[tuple[float, ...], NDArray[np.intp]] = {}
        self._samples: dict[tuple[float, ...], _Samples] = {}
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
            asked = list(map(_log2, coordinates))
            at = [min(max(value, low), high) for value, (low, high) in zip(asked, self._box, strict=True)]
            inside = all(abs(value - held) < 1e-9 for value, held in zip(asked, at, strict=True))
            log_rate = self._shepard(at) if self._line is None else _on_line(self._line, at[0])
            found = self._known[coordinates] = Reading(float(np.exp2(log_rate)), inside)
        return found

    def _shepard(self, at: list[float]) -> float:
        """Of the points that can be among the nearest there."""
        cube = tuple([floor(value / CUBES[-1]) for value in at])
        if cube not in self._samples:
            places = self._places(at)
            self._samples[cube] = self._coordinates[places].T.copy(), self._log_rate[places]
        columns, log_rate = self._samples[cube]
        apart = columns - np.array(at)[:, None]
        return _shepard(np.add.reduce(np.abs(apart, out=apart), axis=0), log_rate)

    def _places(self, at: list[float]) -> NDArray[np.intp]:
        """In the smallest of `CUBES` around; those in a larger one are sought once for all inside it."""
        places = np.arange(len(self._log_rate))
        for octaves in CUBES:
            corner = np.floor(np.array(at) / octaves) * octaves
            key = (octaves, *corner.tolist())
            if key not in self._near:
                nearest, farthest = _reach(self._coordinates[places], corner, corner + octaves)
                self._near[key] = places[_can_be(nearest, farthest)]
            places = self._near[key]
        return places

    def most(self, low: Sequence[float], high: Sequence[float]) -> float:
        """What no reading between two corners is above.

        A reading in a cell is held against the points that can be among the nearest there: a point is not
        where six others are nearer from everywhere in it. A reading is a mean of its nearest points; that is
        most where those of higher rates weigh as much as they can in the cell, and the others as little. The
        cell of which most is not known to be less is halved, so many times. Over one coordinate readings lie
        on straight lines: the highest of both ends and of the points between.

        Args:
            low, high: corners, in each coordinate 0 < low <= high.

        Complexity: O(N log N) for every cell, of which there are at most 2 x `HALVED` + 1.
        """
        key = tuple(low), tuple(high)
        if self._line is not None:
            ends = (self.read(*at).rate for at in key)
            between = (
                rate
                for place, rate in zip(*self._line, strict=True)
                if _log2(low[0]) < place < _log2(high[0])
            )
            return max(*ends, *(float(np.exp2(rate)) for rate in between))
        if key not in self._most:
            first, last = (np.clip(np.log2(np.asarray(at, float)), self._low, self._high) for at in key)
            self._most[key] = float(np.exp2(self._most_between(first, last)))
        return self._most[key]

    def most_along(self, axis: int, edges: Floats, at: Sequence[float]) -> Floats:
        """[cells] what no reading is above between two neighbouring values of one coordinate.

        Between two neighbouring coordinates of points every distance grows or falls with the value asked for,
        so that of two points one is nearer everywhere if it is so at both ends. A point that six others are
        nearer than everywhere is not in a mean; one that no six can be nearer than is in all of them.

        Args:
            axis: of a surface over several coordinates.
            edges: [cells + 1] of that coordinate, ascending.
            at: every coordinate; that of the axis does not matter.

        Complexity: O(N) for every `TOGETHER` cells, and O(M^2) for each, of M points that can be near.
        """
        values = np.clip(np.log2(edges), self._low[axis], self._high[axis])
        fixed = np.clip(np.log2(at), self._low, self._high)
        between = np.unique(self._coordinates[:, axis])
        cuts = np.union1d(values, between[(between > values[0]) & (between < values[-1])])
        if len(cuts) == 1:
            return np.full(
                len(edges) - 1, self.read(*np.exp2(np.where(np.arange(len(at)) == axis, cuts, fixed))).rate
            )
        apart = np.abs(self._coordinates - fixed)
        apart[:, axis] = 0.0
        lines = self._coordinates[:, axis], apart.sum(axis=1)
        found = np.empty(len(cuts) - 1)
        for start in range(0, len(found), TOGETHER):
            found[start : start + TOGETHER] = self._most_beside(*lines, cuts[start : start + TOGETHER + 1])
        first = np.minimum(np.searchsorted(cuts, values[:-1]), len(found) - 1)
        last = np.maximum(np.searchsorted(cuts, values[1:]), first + 1)
        return np.exp2([found[low:high].max() for low, high in zip(first, last, strict=True)])

    def _most_beside(self, along: Floats, aside: Floats, cuts: Floats) -> Floats:
        """[cells] of some that lie beside one another, all in logarithms.

        Args:
            along, aside: [N] where the points are on the axis, and how far from the line.
            cuts: [cells + 1] on the axis.
        """
        ends = np.abs(along - cuts[0]), np.abs(along - cuts[-1])
        is_beside = (along <= cuts[0]) | (along >= cuts[-1])
        nearest = aside + np.where(is_beside, np.minimum(*ends), 0.0)
        places = np.flatnonzero(_can_be(nearest, aside + np.maximum(*ends)))
        places = places[np.argsort(-self._log_rate[places], kind="stable")]
        rates = self._log_rate[places]
        distance = aside[places] + np.abs(along[places] - cuts[:, None])
        nearer = distance[:, None, :] - distance[:, :, None]  # [edges, of a point, another]
        least, most = (of(nearer[:-1], nearer[1:]) for of in (np.minimum, np.maximum))
        can_be = (most < -2 * TIE).sum(axis=2) < NUM_NEIGHBOURS
        is_always = (least < -TIE / 2).sum(axis=2) < NUM_NEIGHBOURS
        near, far = (of(distance[:-1], distance[1:]) for of in (np.minimum, np.maximum))
        heavy = np.where(can_be, np.maximum(near, SLACK) ** -2.0, 0.0)
        light = np.where(is_always, np.maximum(far, SLACK) ** -2.0, 0.0)
        weights, sums = (
            np.cumsum(heavy * by, axis=1)
            + (light * by).sum(axis=1, keepdims=True)
            - np.cumsum(light * by, axis=1)
            for by in (1.0, rates)
        )
        means = np.divide(sums, weights, out=np.full_like(sums, -np.inf), where=weights > 0)
        exact = np.where(near < SLACK, rates, -np.inf)
        found: Floats = np.maximum(means.max(axis=1), exact.max(axis=1))
        return found

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

    def _cell(self, low: NDArray[np.float64], high: NDArray[np.float64], within: _Cell | None) -> _Cell:
        places = np.arange(len(self._log_rate)) if within is None else within.near
        points, rates = self._coordinates[places], self._log_rate[places]
        nearest, farthest = _reach(points, low, high)
        can_be = _can_be(nearest, farthest)
        last = min(NUM_NEIGHBOURS, len(rates)) - 1
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
        return _Cell(low, high, found, places[can_be])

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
    return _on_line(_line(coordinates, value), float(at[0]))


def read_line(points: Iterable[tuple[float, float]], at: float) -> float:
    """As `Surface` reads few points (coordinate, rate), the coordinates ascending, without keeping them."""
    places, values = zip(*[map(_log2, point) for point in points], strict=True)
    held = min(max(_log2(at), places[0]), places[-1])
    return float(np.exp2(_on_line((places, values), held)))


def _log2(value: float) -> float:
    """numpy's: the standard library's differs in the last bit on some machines."""
    return float(np.log2(value))


def _reach(points: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> _Samples:
    """[N] least and most distance of each point from anywhere between two corners."""
    nearest = np.maximum(np.maximum(low - points, points - high), 0.0).sum(axis=1)
    return nearest, np.maximum(np.abs(points - low), np.abs(points - high)).sum(axis=1)


def _can_be(nearest: NDArray[np.float64], farthest: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[N] whether a point can be among the nearest there: no six others are nearer from everywhere."""
    last = min(NUM_NEIGHBOURS, len(farthest)) - 1
    found: NDArray[np.bool_] = nearest <= np.partition(farthest, last)[last] + SLACK
    return found


def _line(coordinates: NDArray[np.float64], value: NDArray[np.float64]) -> _Line:
    """Over one coordinate: the places, ascending, and the mean of the values at each."""
    places, inverse = np.unique(coordinates[:, 0], return_inverse=True)
    return places.tolist(), (np.bincount(inverse, weights=value) / np.bincount(inverse)).tolist()


def _on_line(line: _Line, at: float) -> float:
    """Level beyond the ends."""
    places, values = line
    index = bisect_right(places, at) - 1
    if index < 0 or index == len(places) - 1 or places[index] == at:
        return values[max(index, 0)]
    slope = (values[index + 1] - values[index]) / (places[index + 1] - places[index])
    return slope * (at - places[index]) + values[index]


def _shepard(distance: NDArray[np.float64], value: NDArray[np.float64]) -> float:
    """By ufuncs themselves: `sum` and its like are Python around them, which takes most of a reading."""
    nearest = min(NUM_NEIGHBOURS, len(distance)) - 1
    ascending = distance.copy()
    ascending.partition(nearest)
    near = distance <= float(ascending[nearest]) + TIE
    distance, value = distance[near], value[near]
    if np.minimum.reduce(distance) < TIE:
        return float(value[distance < TIE].mean())
    weight = distance**-2.0
    return float(np.add.reduce(weight * value) / np.add.reduce(weight))
