"""Seconds as a quadratic in tokens, for planners that price thousands of samples."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

FIT_TOKENS = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """a x^2 + b x + c seconds for x tokens."""

    square_s: float
    linear_s: float
    constant_s: float

    def seconds(self, tokens: float) -> float:
        """The seconds of x tokens; 0 for none."""
        if tokens <= 0:
            return 0.0
        return (self.square_s * tokens + self.linear_s) * tokens + self.constant_s


def fit_quadratic(tokens: Sequence[float], seconds: Sequence[float]) -> Quadratic:
    """Least squares on relative errors, no coefficient below 0.

    Source: Entrain (dissertation, section 4.4.1), T(x) = a x^2 + b x + c by linear regression.
    Differs: relative errors, since times span orders of magnitude; a cost that falls with tokens is never
    fitted; and in rational numbers, rounded once: a library's sums differ in their last bits between
    processors, which would group samples of equal work differently.

    Raises:
        ValueError: fewer than three different token counts, or a count or time that is not > 0.

    Complexity: seven sets of coefficients, a 3 x 3 system each, in numbers that grow with the points.
    """
    if len(tokens) != len(seconds) or len(set(tokens)) < 3:
        raise ValueError(
            f"a quadratic wants a time at >= 3 different token counts, got {len(tokens)} and {len(seconds)}"
        )
    if min(*tokens, *seconds) <= 0:
        raise ValueError(
            f"token counts and times must be > 0, got {min(tokens):g} tokens and {min(seconds):g} s"
        )
    rows = [
        (Fraction(x) ** 2 / Fraction(y), Fraction(x) / Fraction(y), 1 / Fraction(y))
        for x, y in zip(tokens, seconds, strict=True)
    ]
    columns = list(zip(*rows, strict=True))
    gram = [[_sum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in columns]
    _, best = max(_candidates(gram, [_sum(column) for column in columns]))
    return Quadratic(*map(float, best))


def _sum(values: Iterable[Fraction]) -> Fraction:
    return sum(values, Fraction())


def _candidates(
    gram: Sequence[Sequence[Fraction]], aims: Sequence[Fraction]
) -> Iterator[tuple[Fraction, list[Fraction]]]:
    """Yield (decrease of the squared error, coefficients) of the best fit by each set of terms, if >= 0.

    The best fit without negative coefficients is the unconstrained best fit of the terms that it uses.
    """
    for size in (1, 2, 3):
        for used in combinations(range(3), size):
            coefficients = dict(zip(used, _solved(gram, aims, used), strict=True))
            if min(coefficients.values()) >= 0:
                fall = _sum(value * aims[i] for i, value in coefficients.items())
                yield fall, [coefficients.get(i, Fraction()) for i in range(3)]


def _solved(
    gram: Sequence[Sequence[Fraction]], aims: Sequence[Fraction], used: Sequence[int]
) -> list[Fraction]:
    """Solve the normal equations of some terms by Gauss-Jordan; they are positive definite: no pivot is 0."""
    rows = [[*(gram[i][j] for j in used), aims[i]] for i in used]
    for pivot_index in range(len(rows)):
        pivot = rows[pivot_index] = [value / rows[pivot_index][pivot_index] for value in rows[pivot_index]]
        for other, row in enumerate(rows):
            if other != pivot_index:
                rows[other] = [value - row[pivot_index] * by for value, by in zip(row, pivot, strict=True)]
    return [row[-1] for row in rows]
