"""Bounds of token distributions: what is possible at all, and what chance gives."""

from math import exp, inf, log, log1p

import numpy as np
from numpy.typing import ArrayLike

from workbench.balance.tokens.policies import checked_work


def least_possible(work: ArrayLike, num_ranks: int) -> float:
    """Return a lower bound on the work of the heaviest rank under any distribution.

    The largest of: the mean per rank (rounded up for whole numbers), the heaviest block, and the two
    that must share a rank when the G + 1 heaviest blocks are on G ranks. Work and errors: as of
    `tokens.longest_first`. Complexity: O(B).
    """
    loads = checked_work(work, num_ranks)
    total = loads.sum()
    mean = -(-int(total) // num_ranks) if loads.dtype.kind == "i" else float(total) / num_ranks
    bounds = [float(mean), float(loads.max())]
    if loads.size > num_ranks:
        heaviest = np.partition(loads, loads.size - num_ranks - 1)[-num_ranks - 1 :]
        bounds.append(float(np.partition(heaviest, 1)[:2].sum()))
    return max(bounds)


def random_tail(work: ArrayLike, num_ranks: int, max_over_mean: float) -> float:
    """Return Chernoff's bound on the probability that `random_blocks` makes some rank heavier than that.

    A rank's work is a sum of independent terms in 0..largest with mean m, so P(work >= (1 + d) m) <=
    (e**d / (1 + d)**(1 + d))**(m / largest); Chernoff 1952, as Cornstarch v1 section 5.3 cites it.
    G ranks are G times as likely.

    Returns:
        a probability, 1.0 where the bound is void.

    Raises:
        ValueError: `max_over_mean` below 1; errors of `tokens.longest_first`.
    """
    if not max_over_mean >= 1:
        raise ValueError(f"max_over_mean must be >= 1, got {max_over_mean}")
    exponent = _means_per_block(work, num_ranks) * _rate(max_over_mean - 1)
    return min(1.0, num_ranks * exp(-exponent))


def random_bound(work: ArrayLike, num_ranks: int, *, failure_probability: float) -> float:
    """Return the max/mean that `random_blocks` exceeds with at most this probability (cf. `random_tail`).

    No draw is worse than G, everything on one rank, so the bound is at most that.

    Raises:
        ValueError: a probability outside (0, 1); errors of `tokens.longest_first`.
    """
    if not 0 < failure_probability < 1:
        raise ValueError(f"failure_probability must be in (0, 1), got {failure_probability}")
    required = log(num_ranks / failure_probability) / _means_per_block(work, num_ranks)
    below, above = 0.0, num_ranks - 1.0
    if _rate(above) < required:
        return float(num_ranks)
    for _ in range(100):  # halves the gap until float64 has no number between
        middle = (below + above) / 2
        below, above = (middle, above) if _rate(middle) < required else (below, middle)
    return 1 + above


def _means_per_block(work: ArrayLike, num_ranks: int) -> float:
    """Return the mean work of a rank over the largest block; infinite where there is no work."""
    loads = checked_work(work, num_ranks)
    largest = float(loads.max())
    return float(loads.sum()) / num_ranks / largest if largest else inf


def _rate(excess: float) -> float:
    """Return (1 + d) ln(1 + d) - d, the exponent of Chernoff's bound per mean."""
    return (1 + excess) * log1p(excess) - excess
