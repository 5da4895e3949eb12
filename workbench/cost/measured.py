"""Layers measured as a whole, with times of other sizes interpolated between the measured ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.cost.execution import Execution
from workbench.cost.interpolate import Surface
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.layer_time import CheckpointTime, LayerTime
from workbench.cost.roofline import Work
from workbench.model.layer import Layer, TokenCount
from workbench.on_demand import OnDemand

optimize = OnDemand("scipy.optimize")
COLUMNS = (
    "forward_s",
    "input_grad_s",
    "weight_grad_s",
    "weight_only_s",
    "forward_only_s",
    "split_input_s",
    "split_weight_s",
)
RECOMPUTED = ("recompute_forward_s", "recompute_backward_s", "recompute_idle_s")  # all or none of a point
# What stands in for a column that was not measured.
STAND_IN = {
    "forward_only_s": "forward_s",
    "split_input_s": "input_grad_s",
    "split_weight_s": "weight_grad_s",
}


class MeasuredTime(NamedTuple):
    """Whether the size is inside the measured range, and seconds by column of `COLUMNS` and `RECOMPUTED`."""

    inside: bool
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    weight_only_s: float
    forward_only_s: float
    split_input_s: float
    split_weight_s: float
    recompute_forward_s: float | None = None
    recompute_backward_s: float | None = None
    recompute_idle_s: float | None = None


class _Size(NamedTuple):
    """A call's rows, tokens and query-key pairs; for cross-attention readers, context and their pairs."""

    rows: int
    tokens: int
    area: int
    readers: int
    context: int
    context_area: int

    @property
    def features(self) -> tuple[float, ...]:
        """The features that time is linear in; the last three are 0 for layers without cross-attention."""
        pairs = (0.0, float(self.readers), float(self.context), float(self.context_area))
        row_features = (1.0, float(self.rows), float(self.tokens), float(self.area))
        return (*row_features[:3], *pairs) if self.readers else (*row_features, *pairs[1:])

    @property
    def place(self) -> tuple[float, float, float]:
        """Rows, tokens, and pairs a token: the coordinates for interpolation."""
        tokens, area = (self.readers, self.context_area) if self.readers else (self.tokens, self.area)
        return float(self.rows), float(tokens), max(area / tokens, 1.0)


class MeasuredLayer:
    """One layer on one machine.

    Cross-attention works on reading tokens and on their context; tokens that pass by count too, and pairs
    are those between the two. Pairs of other layers are the masks', whatever a window hides, as in the
    measurement.

    A measured size gets its own times. Any other gets a non-negative least-squares fit (relative errors)
    over calls, rows, tokens and query-key pairs, which is quadratic in the tokens of a row and linear in
    rows, times the measured-over-fitted ratio interpolated between the measured sizes.

    Complexity: O(points) to build and to read.
    """

    def __init__(self, table: LayerTable) -> None:
        if not table.points:
            raise ValueError(f"layer {table.signature}: want at least one measured size, got none")
        self._points = table.points
        self._reads = any(point.reader_tokens for point in table.points)
        sizes = [self._size_of(Work((point.row,) * point.rows)) for point in table.points]
        is_recomputed = any(point.recompute_backward_s is not None for point in table.points)
        self._names = (*COLUMNS, *RECOMPUTED) if is_recomputed else COLUMNS
        self._columns = {name: _Column(sizes, _seconds(table.points, name)) for name in self._names}
        read = [(size.readers, size.context) for size in sizes]
        self._least, self._most = (tuple(map(extreme, zip(*read, strict=True))) for extreme in (min, max))
        tokens = [point.rows * point.tokens_in for point in table.points]
        length = [point.tokens_in for point in table.points]
        self._tokens, self._length = (min(tokens), max(tokens)), (min(length), max(length))

    def read(self, work: Work) -> MeasuredTime:
        """The times of a work."""
        size = self._size_of(work)
        exact = self._exact(work.whole)
        if exact is not None:
            return MeasuredTime(True, *(float(_seconds((exact,), name)[0]) for name in self._names))  # noqa: FBT003
        read = size.readers, size.context
        inside = (
            self._tokens[0] <= size.tokens <= self._tokens[1]
            and all(map(lambda low, value, high: low <= value <= high, self._least, read, self._most))
            and self._length[0] <= min(row.tokens_in for row in work.rows)
            and max(row.tokens_in for row in work.rows) <= self._length[1]
        )
        return MeasuredTime(inside, *(self._columns[name].read(size) for name in self._names))

    def least_s(self, work: Work) -> MeasuredTime:
        """A lower bound on calls that do this work together, however it is split.

        The fit without its constant term, times the smallest measured-over-fitted ratio.
        """
        size = self._size_of(work)
        return MeasuredTime(True, *(self._columns[name].least(size) for name in COLUMNS))  # noqa: FBT003

    def _size_of(self, work: Work) -> _Size:
        read = (work.tokens(TokenCount.READERS), work.tokens(TokenCount.CONTEXT), work.context_area)
        sizes = len(work.rows), work.tokens(TokenCount.IN), work.attention_area
        return _Size(*sizes, *(read if self._reads else (0, 0, 0)))

    def _exact(self, work: Work) -> LayerPoint | None:
        if len(set(work.rows)) > 1:
            return None
        row = work.rows[0]
        row = replace(row, tokens_out=row.tokens_in)
        if not self._reads:
            row = replace(row, context_tokens=0, reader_tokens=0, context_area=0)
        return next((p for p in self._points if (p.rows, p.row) == (len(work.rows), row)), None)


class _Fit(NamedTuple):
    """Coefficients of a size's features, and the interpolated ratio of measured over fitted times."""

    coefficients: NDArray[np.float64]
    ratio: Surface


class _Column:
    """One kind of time as a function of size; fitted on first use, as few columns are ever used."""

    def __init__(self, sizes: Sequence[_Size], seconds: NDArray[np.float64]) -> None:
        self._sizes, self._seconds = sizes, seconds

    @cached_property
    def _fit(self) -> _Fit | None:
        """The fit; None where no time is above 0."""
        is_positive = self._seconds > 0
        if not is_positive.any():
            return None
        features = np.array([size.features for size in self._sizes])[is_positive]
        seconds = self._seconds[is_positive]
        scale = features.max(axis=0)
        scale[scale == 0] = 1.0
        solution, _ = optimize.nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
        coefficients = solution / scale
        ratios = zip(compress(self._sizes, is_positive), seconds / (features @ coefficients), strict=True)
        return _Fit(coefficients, Surface([(*size.place, float(ratio)) for size, ratio in ratios]))

    def read(self, size: _Size) -> float:
        if self._fit is None:
            return 0.0
        return (
            float(np.array(size.features) @ self._fit.coefficients) * self._fit.ratio.read(*size.place).rate
        )

    def least(self, size: _Size) -> float:
        if self._fit is None:
            return 0.0
        return float(np.array(size.features)[1:] @ self._fit.coefficients[1:]) * self._fit.ratio.extremes[0]


def _seconds(points: tuple[LayerPoint, ...], name: str) -> NDArray[np.float64]:
    """A column of times; where weights alone were not timed, both gradients stand in for them."""
    if name == "weight_only_s":
        both = [point.input_grad_s + point.weight_grad_s for point in points]
        alone = [point.weight_only_s for point in points]
        return np.array([b if a is None else min(a, b) for a, b in zip(alone, both, strict=True)])
    if name in RECOMPUTED:
        return np.array([_recomputed_s(point, name) for point in points])
    values = [getattr(point, name) for point in points]
    stand_in = STAND_IN.get(name, name)
    return np.array([getattr(p, stand_in) if s is None else s for p, s in zip(points, values, strict=True)])


def _recomputed_s(point: LayerPoint, name: str) -> float:
    """The measured time under a checkpoint, or the sum of its parts where it was not measured."""
    measured_s: float | None = getattr(point, name)
    if measured_s is not None:
        return measured_s
    if name == "recompute_backward_s":
        return point.forward_s + point.input_grad_s + point.weight_grad_s
    return point.forward_s if point.forward_only_s is None else point.forward_only_s


def in_one_piece(time: LayerTime, run: Execution) -> LayerTime:
    """The time of a layer measured whole, marked as unmeasured where sums are to run in pieces."""
    if run.sum_pieces == 1:
        return time
    return replace(time, unmeasured=time.unmeasured | {"collective_pieces: measured in one piece"})


def from_measured(layer: Layer, measured: MeasuredLayer, work: Work) -> LayerTime:
    """The time of some work by a layer's tables."""
    time = measured.read(work)
    reasons = () if time.inside else (f"{layer.kind} layer outside the measured sizes",)
    return LayerTime(
        time.forward_s,
        time.input_grad_s,
        time.weight_grad_s,
        frozenset(reasons),
        min(time.input_grad_s, max(0.0, time.weight_only_s - time.weight_grad_s)),
        time.forward_only_s,
        time.split_input_s,
        time.split_weight_s,
        _checkpoint(time),
    )


def _checkpoint(time: MeasuredTime) -> CheckpointTime | None:
    """Times under a checkpoint minus those without, at least 0, as noise may make the difference negative."""
    under = time.recompute_forward_s, time.recompute_backward_s, time.recompute_idle_s
    parts = time.forward_only_s, time.forward_s + time.input_grad_s + time.weight_grad_s, time.forward_only_s
    added = [max(0.0, s - part) for s, part in zip(under, parts, strict=True) if s is not None]
    return CheckpointTime(*added) if added else None
