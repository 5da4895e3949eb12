"""Layers measured as a whole: times of unmeasured sizes, read between the measured ones."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from workbench.cost.interpolate import Surface
from workbench.cost.profile import LayerPoint, LayerTable
from workbench.cost.roofline import Work
from workbench.graph.layer import TokenCount

COLUMNS = (
    "forward_s",
    "input_grad_s",
    "weight_grad_s",
    "weight_only_s",
    "forward_only_s",
    "split_input_s",
    "split_weight_s",
)
# What stands in for a column that was not measured.
STAND_IN = {
    "forward_only_s": "forward_s",
    "split_input_s": "input_grad_s",
    "split_weight_s": "weight_grad_s",
}


class MeasuredTime(NamedTuple):
    """Whether the size lies among the measured ones, and seconds by column of `COLUMNS`."""

    inside: bool
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    weight_only_s: float
    forward_only_s: float
    split_input_s: float
    split_weight_s: float


class MeasuredLayer:
    """One layer on one machine.

    A size with a row of its own gets that row's times. Any other gets a non-negative
    least-squares fit (relative errors) over calls, rows, tokens and query-key pairs, which
    is quadratic in the tokens of a row and linear in rows, times the measured-over-fitted
    ratio interpolated between the measured sizes.

    Complexity: O(points) to build and to read.
    """

    def __init__(self, table: LayerTable) -> None:
        if not table.points:
            raise ValueError(f"layer {table.signature}: want at least one measured size, got none")
        self._points = table.points
        features = np.array(
            [_features(p.rows, p.rows * p.tokens_in, p.rows * p.attention_area) for p in table.points]
        )
        self._columns = {name: _Column(features, _seconds(table.points, name)) for name in COLUMNS}
        tokens = [point.rows * point.tokens_in for point in table.points]
        length = [point.tokens_in for point in table.points]
        self._tokens, self._length = (min(tokens), max(tokens)), (min(length), max(length))

    def read(self, work: Work) -> MeasuredTime:
        """Times of that work."""
        rows, tokens, area = len(work.rows), work.tokens(TokenCount.IN), work.attention_area
        exact = self._exact(work)
        if exact is not None:
            return MeasuredTime(True, *(float(_seconds((exact,), name)[0]) for name in COLUMNS))  # noqa: FBT003
        features = np.array(_features(rows, tokens, area))
        inside = (
            self._tokens[0] <= tokens <= self._tokens[1]
            and self._length[0] <= min(row.tokens_in for row in work.rows)
            and max(row.tokens_in for row in work.rows) <= self._length[1]
        )
        return MeasuredTime(inside, *(self._columns[name].read(features) for name in COLUMNS))

    def _exact(self, work: Work) -> LayerPoint | None:
        if len(set(work.rows)) > 1:
            return None
        row = work.rows[0]
        for point in self._points:
            size = (point.rows, point.tokens_in, point.attention_area)
            if size == (len(work.rows), row.tokens_in, row.attention_area):
                return point
        return None


class _Column:
    """One kind of time over the features (1, rows, tokens, pairs)."""

    def __init__(self, features: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
        self._zero = not (seconds > 0).any()
        self._coefficients: NDArray[np.float64] = np.zeros(features.shape[1])
        self._ratio: Surface | None = None
        if self._zero:
            return
        kept = seconds > 0
        features, seconds = features[kept], seconds[kept]
        scale = features.max(axis=0)
        scale[scale == 0] = 1.0
        solution, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
        self._coefficients = solution / scale
        fitted = features @ self._coefficients
        points = [(*_place(row), float(ratio)) for row, ratio in zip(features, seconds / fitted, strict=True)]
        self._ratio = Surface(points)

    def read(self, features: NDArray[np.float64]) -> float:
        if self._ratio is None:
            return 0.0
        return float(features @ self._coefficients) * self._ratio.read(*_place(features)).rate


def _features(rows: int, tokens: int, area: int) -> tuple[float, ...]:
    return (1.0, float(rows), float(tokens), float(area))


def _place(features: NDArray[np.float64]) -> tuple[float, float, float]:
    """Rows, tokens, and pairs a token: where a size stands among others."""
    _, rows, tokens, area = (float(value) for value in features)
    return rows, tokens, max(area / tokens, 1.0)


def _seconds(points: tuple[LayerPoint, ...], name: str) -> NDArray[np.float64]:
    """A column; where weights alone were not timed, both gradients stand in for them."""
    if name == "weight_only_s":
        both = [point.input_grad_s + point.weight_grad_s for point in points]
        alone = [point.weight_only_s for point in points]
        return np.array([b if a is None else min(a, b) for a, b in zip(alone, both, strict=True)])
    found = [getattr(point, name) for point in points]
    instead = STAND_IN.get(name, name)
    return np.array([getattr(p, instead) if s is None else s for p, s in zip(points, found, strict=True)])
