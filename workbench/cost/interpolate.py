"""Interpolates tables of measured rates."""

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
SLACK = 1e-6  # tolerance of distances, above rounding errors
HALVED = 64  # most cells that are halved for an upper bound
NARROW = 1 / 64  # octaves; narrower cells are not halved
TIE = 1e-9  # distances that differ by less count as equal
TOGETHER = 16  # neighbouring cells whose nearest points are found together
CUBES = (1.0, 0.25)  # side lengths in octaves, largest first, each a multiple of the next
_Line = tuple[Sequence[float], Sequence[float]]
_Samples = tuple[NDArray[np.float64], NDArray[np.float64]]


class Reading(NamedTuple):
    """An interpolated rate, and whether the coordinates are inside the measured box."""

    rate: float
    inside: bool


class _Cell(NamedTuple):
    """A part of a surface's box, in logarithms.

    Args:
        low, high: corners.
        most: upper bound on readings inside.
        near: indices of the points that can be among the nearest there.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    most: float
    near: NDArray[np.intp]


class Surface:
    """Rates over positive coordinates, interpolated in log space; exact at measured points.

    Over one coordinate: a straight line between the two neighbours. Over several: inverse
    squared distance over the six nearest points (Shepard 1968, "A two-dimensional
    interpolation function for irregularly-spaced data", ACM national conference), all
    points at the sixth distance included, so that the result does not depend on the order of points.
    Coordinates outside the box of the points are moved to its face.

    Args:
        points: [N] tuples (coordinate, ..., rate), all > 0.

    Complexity: equal readings are computed once. Over one coordinate O(log N). Over several O(M), for the
        M points that can be among the nearest in a cube of a quarter octave, and O(N) once for each cube.
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
        """Smallest and largest rate of all points, which bound every reading."""
        return float(np.exp2(self._log_rate.min())), float(np.exp2(self._log_rate.max()))

    @cached_property
    def _line(self) -> _Line | None:
        """The line of a surface over one coordinate; None for several."""
        return _line(self._coordinates, self._log_rate) if self._coordinates.shape[1] == 1 else None

    def read(self, *coordinates: float) -> Reading:
        """The interpolated rate at these coordinates."""
        reading = self._known.get(coordinates)
        if reading is None:
            logs = list(map(_log2, coordinates))
            clamped = [min(max(value, low), high) for value, (low, high) in zip(logs, self._box, strict=True)]
            inside = all(abs(value - inner) < 1e-9 for value, inner in zip(logs, clamped, strict=True))
            log_rate = self._shepard(clamped) if self._line is None else _on_line(self._line, clamped[0])
            reading = self._known[coordinates] = Reading(float(np.exp2(log_rate)), inside)
        return reading

    def _shepard(self, coordinates: list[float]) -> float:
        """The interpolated log rate, from the points that can be among the nearest."""
        cube = tuple([floor(value / CUBES[-1]) for value in coordinates])
        if cube not in self._samples:
            indices = self._near_indices(coordinates)
            self._samples[cube] = self._coordinates[indices].T.copy(), self._log_rate[indices]
        columns, log_rate = self._samples[cube]
        distances = columns - np.array(coordinates)[:, None]
        return _shepard(np.add.reduce(np.abs(distances, out=distances), axis=0), log_rate)

    def _near_indices(self, coordinates: list[float]) -> NDArray[np.intp]:
        """Indices of points that can be nearest in the smallest cube around; each cube is computed once."""
        indices = np.arange(len(self._log_rate))
        for octaves in CUBES:
            corner = np.floor(np.array(coordinates) / octaves) * octaves
            key = (octaves, *corner.tolist())
            if key not in self._near:
                nearest, farthest = _reach(self._coordinates[indices], corner, corner + octaves)
                self._near[key] = indices[_can_be(nearest, farthest)]
            indices = self._near[key]
        return indices

    def most(self, low: Sequence[float], high: Sequence[float]) -> float:
        """An upper bound on all readings between two corners.

        In each cell, only points matter that can be among the nearest: no six others are nearer from
        everywhere in it. A reading is a weighted mean of its nearest points, which is largest where higher
        rates have their largest weights in the cell and lower rates their smallest. The cell with the highest
        bound is halved, up to `HALVED` times. Over one coordinate readings are piecewise linear: the bound
        is the maximum of both ends and of the points between.

        Args:
            low, high: corners, in each coordinate 0 < low <= high.

        Complexity: O(N log N) for every cell, of which there are at most 2 x `HALVED` + 1.
        """
        key = tuple(low), tuple(high)
        if self._line is not None:
            ends = (self.read(*at).rate for at in key)
            between = (
                rate
                for coordinate, rate in zip(*self._line, strict=True)
                if _log2(low[0]) < coordinate < _log2(high[0])
            )
            return max(*ends, *(float(np.exp2(rate)) for rate in between))
        if key not in self._most:
            first, last = (np.clip(np.log2(np.asarray(at, float)), self._low, self._high) for at in key)
            self._most[key] = float(np.exp2(self._most_between(first, last)))
        return self._most[key]

    def most_along(self, axis: int, edges: Floats, at: Sequence[float]) -> Floats:
        """[cells] upper bounds on readings between neighbouring values of one coordinate.

        Between two neighbouring coordinates of points every distance is monotonic, so that a point that is
        nearer than another at both ends is nearer everywhere. A point with six others nearer everywhere is in
        no mean; one that never has six nearer is in every mean.

        Args:
            axis: index of the coordinate, of several.
            edges: [cells + 1] values of that coordinate, ascending.
            at: all coordinates; that of the axis is ignored.

        Complexity: O(N) for every `TOGETHER` cells, and O(M^2) for each cell with M points that can be near.
        """
        values = np.clip(np.log2(edges), self._low[axis], self._high[axis])
        fixed = np.clip(np.log2(at), self._low, self._high)
        between = np.unique(self._coordinates[:, axis])
        cuts = np.union1d(values, between[(between > values[0]) & (between < values[-1])])
        if len(cuts) == 1:
            return np.full(
                len(edges) - 1, self.read(*np.exp2(np.where(np.arange(len(at)) == axis, cuts, fixed))).rate
            )
        distances = np.abs(self._coordinates - fixed)
        distances[:, axis] = 0.0
        lines = self._coordinates[:, axis], distances.sum(axis=1)
        bounds = np.empty(len(cuts) - 1)
        for start in range(0, len(bounds), TOGETHER):
            bounds[start : start + TOGETHER] = self._most_beside(*lines, cuts[start : start + TOGETHER + 1])
        first = np.minimum(np.searchsorted(cuts, values[:-1]), len(bounds) - 1)
        last = np.maximum(np.searchsorted(cuts, values[1:]), first + 1)
        return np.exp2([bounds[low:high].max() for low, high in zip(first, last, strict=True)])

    def _most_beside(self, along: Floats, aside: Floats, cuts: Floats) -> Floats:
        """[cells] upper bounds for neighbouring cells, all in logarithms.

        Args:
            along, aside: [N] positions of the points on the axis, and their distances from the line.
            cuts: [cells + 1] positions on the axis.
        """
        ends = np.abs(along - cuts[0]), np.abs(along - cuts[-1])
        is_beside = (along <= cuts[0]) | (along >= cuts[-1])
        nearest = aside + np.where(is_beside, np.minimum(*ends), 0.0)
        indices = np.flatnonzero(_can_be(nearest, aside + np.maximum(*ends)))
        indices = indices[np.argsort(-self._log_rate[indices], kind="stable")]
        rates = self._log_rate[indices]
        distance = aside[indices] + np.abs(along[indices] - cuts[:, None])
        nearer = distance[:, None, :] - distance[:, :, None]  # [edges, of a point, another]
        least, most = (pairwise(nearer[:-1], nearer[1:]) for pairwise in (np.minimum, np.maximum))
        can_be = (most < -2 * TIE).sum(axis=2) < NUM_NEIGHBOURS
        is_always = (least < -TIE / 2).sum(axis=2) < NUM_NEIGHBOURS
        near, far = (pairwise(distance[:-1], distance[1:]) for pairwise in (np.minimum, np.maximum))
        heavy = np.where(can_be, np.maximum(near, SLACK) ** -2.0, 0.0)
        light = np.where(is_always, np.maximum(far, SLACK) ** -2.0, 0.0)
        weights, sums = (
            np.cumsum(heavy * factor, axis=1)
            + (light * factor).sum(axis=1, keepdims=True)
            - np.cumsum(light * factor, axis=1)
            for factor in (1.0, rates)
        )
        means = np.divide(sums, weights, out=np.full_like(sums, -np.inf), where=weights > 0)
        exact = np.where(near < SLACK, rates, -np.inf)
        bounds: Floats = np.maximum(means.max(axis=1), exact.max(axis=1))
        return bounds

    def _most_between(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> float:
        """`most` over several coordinates, all in logarithms."""
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
        indices = np.arange(len(self._log_rate)) if within is None else within.near
        points, rates = self._coordinates[indices], self._log_rate[indices]
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
        bound = float(max((sums / weights).max(), exact.max(initial=-np.inf)))
        if within is not None:
            bound = min(bound, within.most)
        return _Cell(low, high, bound, indices[can_be])

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
        is_kept = np.ones(len(order), dtype=bool)
        errors = np.empty(len(folds))
        for position, index in enumerate(folds):
            is_kept[index] = False
            coordinates = self._coordinates[index]
            predicted = _between(self._coordinates[is_kept], self._log_rate[is_kept], coordinates)
            errors[position] = abs(np.exp2(predicted - self._log_rate[index]) - 1)
            is_kept[index] = True
        return float(np.median(errors)), float(np.quantile(errors, 0.9))


def _between(
    coordinates: NDArray[np.float64], value: NDArray[np.float64], query: NDArray[np.float64]
) -> float:
    if coordinates.shape[1] > 1:
        return _shepard(np.abs(coordinates - query).sum(axis=1), value)
    return _on_line(_line(coordinates, value), float(query[0]))


def read_line(points: Iterable[tuple[float, float]], coordinate: float) -> float:
    """The rate at a coordinate by a few points (coordinate, rate), ascending: as `Surface`, uncached."""
    coordinates, values = zip(*[map(_log2, point) for point in points], strict=True)
    clamped = min(max(_log2(coordinate), coordinates[0]), coordinates[-1])
    return float(np.exp2(_on_line((coordinates, values), clamped)))


def _log2(value: float) -> float:
    """numpy's logarithm: the standard library's differs in the last bit on some machines."""
    return float(np.log2(value))


def _reach(points: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> _Samples:
    """[N] smallest and largest distance of each point from the box between two corners."""
    nearest = np.maximum(np.maximum(low - points, points - high), 0.0).sum(axis=1)
    return nearest, np.maximum(np.abs(points - low), np.abs(points - high)).sum(axis=1)


def _can_be(nearest: NDArray[np.float64], farthest: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[N] whether a point can be among the nearest in a cell: no six others are nearer from everywhere."""
    last = min(NUM_NEIGHBOURS, len(farthest)) - 1
    can_be: NDArray[np.bool_] = nearest <= np.partition(farthest, last)[last] + SLACK
    return can_be


def _line(coordinates: NDArray[np.float64], value: NDArray[np.float64]) -> _Line:
    """The distinct coordinates, ascending, and the mean of the values at each."""
    distinct, inverse = np.unique(coordinates[:, 0], return_inverse=True)
    return distinct.tolist(), (np.bincount(inverse, weights=value) / np.bincount(inverse)).tolist()


def _on_line(line: _Line, coordinate: float) -> float:
    """Linear interpolation, constant beyond the ends."""
    coordinates, values = line
    index = bisect_right(coordinates, coordinate) - 1
    if index < 0 or index == len(coordinates) - 1 or coordinates[index] == coordinate:
        return values[max(index, 0)]
    slope = (values[index + 1] - values[index]) / (coordinates[index + 1] - coordinates[index])
    return slope * (coordinate - coordinates[index]) + values[index]


def _shepard(distance: NDArray[np.float64], value: NDArray[np.float64]) -> float:
    """Inverse squared distance weighting, by bare ufuncs: `sum` and the like add most of a reading's time."""
    nearest = min(NUM_NEIGHBOURS, len(distance)) - 1
    ascending = distance.copy()
    ascending.partition(nearest)
    near = distance <= float(ascending[nearest]) + TIE
    distance, value = distance[near], value[near]
    if np.minimum.reduce(distance) < TIE:
        return float(value[distance < TIE].mean())
    weight = distance**-2.0
    return float(np.add.reduce(weight * value) / np.add.reduce(weight))
