"""How many ranks may distribute a layer's experts among each other, as plain numbers."""

from math import gcd


def expert_degrees(num_ranks: int, num_experts: int) -> tuple[int, ...]:
    """Degrees of expert parallelism inside a stage's ranks, ascending: what divides both counts.

    `num_experts` 0: there are none to distribute, which leaves 1. ValueError for no rank.

    Complexity: O(min(num_ranks, num_experts)).
    """
    if num_ranks < 1 or num_experts < 0:
        raise ValueError(f"want >= 1 rank and >= 0 experts, got {num_ranks} and {num_experts}")
    both = gcd(num_ranks, num_experts) if num_experts else 1
    return tuple(degree for degree in range(1, both + 1) if both % degree == 0)


def nearest_expert_degree(wanted: int, num_ranks: int, num_experts: int) -> int:
    """Of those, the one that is closest to what was wanted; of two the smaller."""
    return min(expert_degrees(num_ranks, num_experts), key=lambda ep: (abs(ep - wanted), ep))
