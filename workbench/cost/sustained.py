"""Ratios of times in long loops to those in short loops, interpolated between measured points."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from workbench.cost.interpolate import Surface, read_line
from workbench.cost.profile import Direction, SustainedHeads, SustainedProducts
from workbench.cost.roofline import Gemm

Points = tuple[tuple[float, ...], ...]


def in_direction(gemm: Gemm, direction: Direction) -> Gemm:
    """The product of a direction, for a layer whose forward is y[m, n] = x[m, k] w[k, n]."""
    match direction:
        case Direction.FORWARD:
            return gemm
        case Direction.INPUT_GRAD:
            return gemm.input_grad
        case Direction.WEIGHT_GRAD:
            return gemm.weight_grad


def product_slowdowns(products: SustainedProducts, short_s: Callable[[Gemm], float]) -> Points:
    """(m, n, k, seconds in a long loop over those in a short loop) of every measured product."""
    return tuple(
        (*shape, 2.0 * math.prod(shape) / rate / short_s(in_direction(Gemm(*shape), products.direction)))
        for *shape, rate in products.table.points
    )


class Line:
    """A ratio as a function of sequence length: log-linear, constant beyond the ends."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        self.points = tuple(points)
        self._surface = Surface(self.points)
        self._inverse = Surface([(length, 1.0 / ratio) for length, ratio in self.points])

    def at(self, length: float) -> float:
        return self._surface.read(length).rate

    def extremes(self, short: float, long: float) -> tuple[float, float]:
        """Smallest and largest value of `at` between two lengths."""
        return 1.0 / self._inverse.most((short,), (long,)), self._surface.most((short,), (long,))


def forward_slowdown(heads: SustainedHeads, short_flop_per_s: Callable[..., float]) -> Line:
    """Seconds of forwards in a long loop over those in a short loop, by length."""
    return Line((at[0], short_flop_per_s(*at) / rate) for *at, rate in heads.forward.points)


def backward_rate(heads: SustainedHeads) -> Line:
    """Backward FLOP/s over forward FLOP/s, by length."""
    passes = zip(heads.forward.points, heads.backward.points, strict=True)
    return Line((forward[0], backward[-1] / forward[-1]) for forward, backward in passes)


class HeadWidths:
    """A ratio as a function of head width and length, for causal and for other masks.

    A measured width has its own line: kernels pad some widths, so neighbours say little about it. Others
    are interpolated log-linearly between the next narrower and the next wider; beyond the ends the last
    width counts. Where only the other kind of mask was measured, that counts.

    Complexity: O(log widths) to read, after the first time at a length.
    """

    def __init__(self, lines: Sequence[tuple[SustainedHeads, Line]]) -> None:
        self._lines: dict[bool, dict[float, Line]] = {
            causal: {table.head_dim: line for table, line in lines if table.causal is causal}
            for causal in (False, True)
        }

    def at(self, head_dim: float, *, causal: bool, length: float) -> float:
        """The ratio; 1 where nothing was measured."""
        lines = self._lines[causal] or self._lines[not causal]
        if not lines:
            return 1.0
        if head_dim in lines:
            return lines[head_dim].at(length)
        widths = sorted(lines)
        index = bisect_left(widths, head_dim)
        neighbours = widths[max(0, index - 1) : index + 1]
        return read_line([(float(width), lines[width].at(length)) for width in neighbours], float(head_dim))

    def extremes(self, head_dim: float, short: float, long: float, *, causal: bool) -> tuple[float, float]:
        """Smallest and largest value of `at` between two lengths."""
        lines = self._lines[causal] or self._lines[not causal]
        width_lines = [lines[head_dim]] if head_dim in lines else lines.values()
        least, most = (
            zip(*(line.extremes(short, long) for line in width_lines), strict=True)
            if width_lines
            else ((1.0,), (1.0,))
        )
        return min(least), max(most)

    def covers(self, head_dim: float) -> bool:
        """Whether the width is inside the measured range."""
        widths = [width for lines in self._lines.values() for width in lines]
        return bool(widths) and min(widths) <= head_dim <= max(widths)

    def has_mask(self, *, causal: bool) -> bool:
        return bool(self._lines[causal])
