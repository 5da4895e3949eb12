"""The exact distribution of microbatches to pipelines, in whole numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import isqrt

UNITS = 1 << 32


@dataclass(frozen=True, slots=True)
class _Spread:
    """A distribution's spread as a function of the level c: sum of (N_i T_i - c)**2 = q - 2 c s + x c**2."""

    counts: tuple[int, ...]
    linear: int
    square: int

    def line(self, level: Fraction) -> Fraction:
        """q - 2 c s."""
        return self.square - 2 * level * self.linear


def distribute(microbatch_s: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """Microbatches per pipeline with the least variance of the pipelines' times.

    Oobleck chapter, Eq. 2.6: minimise the sum of (N_i T_i - mean of all N_i T_i)**2 with the N_i, each at
    least 1, summing up to the global batch. Exact: the mean is the level c that minimises the sum of (N_i
    T_i - c)**2, so c becomes a variable; for a given c the problem is separable and convex, solved by
    taking the least marginal costs, and over c the optima form a lower envelope of lines, found by
    intersecting neighbours (Eisner and Severance 1976). Times are counted in 2**-32 of the longest.
    Differs: the source's constraint gives all pipelines of one template equally many; here they may differ
    by one, so more batches can be distributed.

    Args:
        microbatch_s: [x] T_i, seconds a pipeline takes per microbatch, each > 0.
        num_microbatches: of the global batch.

    Returns:
        [x] N_i; ties go to the lowest level.

    Raises:
        ValueError: no pipeline, a time that is not positive, or fewer microbatches than pipelines.

    Complexity: O(pieces of the envelope x x log x) for x pipelines, a few pieces in practice.
    """
    if not microbatch_s or not all(0 < time < float("inf") for time in microbatch_s):
        raise ValueError(f"want a positive time for every pipeline, got {list(microbatch_s)}")
    if num_microbatches < len(microbatch_s):
        raise ValueError(
            f"{num_microbatches} microbatches cannot be distributed to {len(microbatch_s)} pipelines: "
            f"want at least {len(microbatch_s)}"
        )
    search = _Levels(microbatch_s, num_microbatches)
    return search.best().counts


class _Levels:
    """The lower envelope of distributions over the level."""

    def __init__(self, microbatch_s: Sequence[float], num_microbatches: int) -> None:
        longest = max(microbatch_s)
        self._units = [max(1, round(time / longest * UNITS)) for time in microbatch_s]
        self._total = num_microbatches
        self._even = Fraction(num_microbatches) / sum(Fraction(1, unit) for unit in self._units)

    def best(self) -> _Spread:
        """Search the levels within the root of the best spread around the even one, where all times lie."""
        start = self._at(self._even)
        reach = isqrt(int(self._spread(start)) + 1) + 1
        low, high = self._at(self._even - reach), self._at(self._even + reach)
        candidates = [low, *self._between(low, high), high, start]
        return min(candidates, key=lambda each: (self._spread(each), each.linear, each.counts))

    def _spread(self, spread: _Spread) -> Fraction:
        """The sum of squares around the mean."""
        return spread.square - Fraction(spread.linear**2, len(self._units))

    def _between(self, low: _Spread, high: _Spread) -> list[_Spread]:
        """Lines of the envelope between two of its lines."""
        if low.linear == high.linear:
            return []
        crossing = Fraction(high.square - low.square, 2 * (high.linear - low.linear))
        middle = self._at(crossing)
        if middle.line(crossing) >= low.line(crossing):
            return []
        return [*self._between(low, middle), middle, *self._between(middle, high)]

    def _at(self, level: Fraction) -> _Spread:
        """The best distribution for a level: microbatch k + 1 of a pipeline costs (2k + 1) T**2 - 2 c T.

        Starts with all microbatches below an approximate price, then adds the cheapest or removes the most
        expensive until the total is right; ties go to the first pipeline.
        """
        scale, shift = level.denominator, 2 * level.numerator
        price = self._price(level)
        counts = [
            max(1, (price + shift * unit - scale * unit**2) // (2 * scale * unit**2) + 1)
            for unit in self._units
        ]

        def cost(index: int, count: int) -> int:
            """Cost of a pipeline's count-th microbatch, times the level's denominator."""
            unit = self._units[index]
            return (2 * count - 1) * scale * unit**2 - shift * unit

        indices, missing = range(len(counts)), self._total - sum(counts)
        cheapest = [(cost(index, counts[index] + 1), index) for index in indices]
        heapify(cheapest)
        for _ in range(missing):
            _, index = heappop(cheapest)
            counts[index] += 1
            heappush(cheapest, (cost(index, counts[index] + 1), index))
        costliest = [(-cost(index, counts[index]), -index) for index in indices if counts[index] > 1]
        heapify(costliest)
        for _ in range(-missing):
            index = -heappop(costliest)[1]
            counts[index] -= 1
            if counts[index] > 1:
                heappush(costliest, (-cost(index, counts[index]), -index))
        times = [count * unit for count, unit in zip(counts, self._units, strict=True)]
        return _Spread(tuple(counts), sum(times), sum(time**2 for time in times))

    def _price(self, level: Fraction) -> int:
        """Approximate price at which all microbatches are placed, in units of the level's denominator."""
        placed = sum(level / unit + Fraction(1, 2) for unit in self._units)
        per_price = sum(Fraction(1, 2 * unit**2) for unit in self._units)
        return int((self._total - placed) / per_price * level.denominator)


def nearest_batch(global_batch: int, microbatch: int, num_pipelines: int) -> int:
    """The nearest global batch that can be distributed; of two, the smaller.

    Oobleck chapter, section 2.4.2.2: a batch that cannot be split is not silently changed, another one is
    recommended. A batch can be distributed if it is a multiple of the microbatch, with at least one per
    pipeline.

    Raises:
        ValueError: a size below 1.
    """
    if min(global_batch, microbatch, num_pipelines) < 1:
        raise ValueError(
            f"want sizes >= 1, got batch {global_batch}, microbatch {microbatch}, {num_pipelines} pipelines"
        )
    below = global_batch // microbatch * microbatch
    nearest = below if global_batch - below <= below + microbatch - global_batch else below + microbatch
    return max(nearest, num_pipelines * microbatch)


def num_microbatches(global_batch: int, microbatch: int, num_pipelines: int) -> int:
    """Microbatches of a global batch.

    Raises:
        ValueError: the batch cannot be distributed; the message names the nearest that can.
    """
    nearest = nearest_batch(global_batch, microbatch, num_pipelines)
    if nearest != global_batch:
        raise ValueError(
            f"a global batch of {global_batch} cannot be distributed in microbatches of {microbatch} to "
            f"{num_pipelines} pipelines: the nearest that can is {nearest}"
        )
    return global_batch // microbatch
