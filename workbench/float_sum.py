"""Sums of floats that are equal on every version of Python."""

from collections.abc import Iterable
from functools import reduce
from operator import add


def float_sum(values: Iterable[float], start: float = 0) -> float:
    """The sum from left to right, every step rounded; `start` where there are no values.

    The built-in `sum` of floats carries what rounding loses since Python 3.12, and did not before: a tie
    between two plans fell otherwise, and hashes of plans and traces differed. Plans, prices and traces add
    with this.
    """
    return reduce(add, values, start)
