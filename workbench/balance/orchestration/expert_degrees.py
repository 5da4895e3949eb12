"""Possible degrees of expert parallelism, as plain numbers."""

from math import gcd


def expert_degrees(num_ranks: int, num_experts: int) -> tuple[int, ...]:
    """Return degrees of expert parallelism within a stage's ranks, ascending: the divisors of both counts.

    Without experts the only degree is 1. ValueError for less than one rank.

    Complexity: O(min(num_ranks, num_experts)).
    """
    if num_ranks < 1 or num_experts < 0:
        raise ValueError(f"want >= 1 rank and >= 0 experts, got {num_ranks} and {num_experts}")
    common = gcd(num_ranks, num_experts) if num_experts else 1
    return tuple(degree for degree in range(1, common + 1) if common % degree == 0)


def nearest_expert_degree(requested: int, num_ranks: int, num_experts: int) -> int:
    """Return the possible degree nearest to the requested one; of two the smaller."""
    return min(expert_degrees(num_ranks, num_experts), key=lambda ep: (abs(ep - requested), ep))
