"""How far a prediction may be off: an 80 % interval, from the deviation of each reason.

A step's seconds are taken to err by a factor whose logarithm is normal. Its variance is that of the reasons,
each with a deviation of its own; their errors are correlated (`TOGETHER`), since the same sources, kernels
and habits cause them. Deviations come from leave-one-out errors where a profile has them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.float_sum import float_sum

Z = 1.2816  # of a normal distribution: 80 % lie within so many deviations
MEDIAN_OF_NORMAL = 0.6745  # deviations within which half of a normal distribution lies
TOGETHER = 0.3  # correlation of any two reasons
MOST_SPREAD = 100.0  # of a logarithm: beyond this nothing is known, and floats overflow soon


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason why a prediction may be off.

    Args:
        about: the reason, in words.
        deviation: of the logarithm of the step's seconds, because of it.
        centre: mean of the logarithm of a step's seconds over the predicted ones, because of it.
    """

    about: str
    deviation: float
    centre: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.deviation < math.inf:
            raise ValueError(f"doubt {self.about!r}: want a deviation >= 0, got {self.deviation}")
        if not math.isfinite(self.centre):
            raise ValueError(f"doubt {self.about!r}: want a finite centre, got {self.centre}")


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval that contains a step's seconds with a probability of 80 %.

    Args:
        low_s, high_s: its ends.
        doubts: reasons for its width, widest first.
    """

    low_s: float
    high_s: float
    doubts: tuple[Doubt, ...] = ()

    def overlaps(self, other: "Interval") -> bool:
        """Whether either prediction may be the faster one."""
        return self.low_s <= other.high_s and other.low_s <= self.high_s

    def holds(self, seconds: float) -> bool:
        """Whether the interval contains the seconds."""
        return self.low_s <= seconds <= self.high_s


def interval(seconds: float, doubts: Iterable[Doubt], *, together: float = TOGETHER) -> Interval:
    """Return the interval that follows from doubts: around the predicted seconds, times their centres.

    Raises:
        ValueError: a correlation outside 0 to 1.
    """
    if not 0 <= together <= 1:
        raise ValueError(f"interval: want a correlation from 0 to 1, got {together}; nearest: {TOGETHER}")
    widest = tuple(sorted(doubts, key=lambda doubt: -doubt.deviation))
    deviations = [min(doubt.deviation, MOST_SPREAD) for doubt in widest]
    independent = float_sum(deviation**2 for deviation in deviations)
    correlated = float_sum(deviations) ** 2
    spread = Z * math.sqrt((1 - together) * independent + together * correlated)
    factor = math.exp(min(spread, MOST_SPREAD))
    middle_s = seconds * math.exp(min(float_sum(doubt.centre for doubt in widest), MOST_SPREAD))
    return Interval(middle_s / factor, middle_s * factor, widest)
