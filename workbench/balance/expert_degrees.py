"""How many ranks may deal out a layer's experts among each other, as plain numbers."""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple


class ExpertGrid(NamedTuple):
    """Degrees of a stage: tensor and context parallelism, and ranks among which experts are dealt out."""

    tp: int
    cp: int
    ep: int


def expert_degrees(num_ranks: int, num_experts: int) -> tuple[int, ...]:
    """Degrees of expert parallelism inside a stage's ranks, ascending: what divides both counts.

    `num_experts` 0: there are none to deal out, which leaves 1. ValueError for no rank.

    Complexity: O(min(num_ranks, num_experts)).
    """
    if num_ranks < 1 or num_experts < 0:
        raise ValueError(f"want >= 1 rank and >= 0 experts, got {num_ranks} and {num_experts}")
    both = gcd(num_ranks, num_experts) if num_experts else 1
    return tuple(degree for degree in range(1, both + 1) if both % degree == 0)


def nearest_expert_degree(wanted: int, num_ranks: int, num_experts: int) -> int:
    """Of those, the one that is closest to what was wanted; of two the smaller."""
    return min(expert_degrees(num_ranks, num_experts), key=lambda ep: (abs(ep - wanted), ep))


def expert_grids(num_ranks: int, *, num_heads: int, num_experts: int, most_tp: int) -> Iterator[ExpertGrid]:
    """Every grid of exactly so many ranks, by tp, then ep.

    Args:
        num_ranks: of one stage: tp x cp.
        num_heads: key/value heads, which tp divides.
        num_experts: of each mixture in the stage, which ep divides; 0: none, ep is 1.
        most_tp: ranks that stay together (of a node).

    Yields:
        Grids; `ep` 1 leaves experts to tensor parallelism, which cuts each of them.

    Complexity: O(num_ranks + grids).
    """
    if num_heads < 1 or most_tp < 1:
        raise ValueError(f"want >= 1 head and tp up to >= 1, got {num_heads} and {most_tp}")
    for tp in range(1, min(num_ranks, most_tp) + 1):
        if num_ranks % tp == 0 and num_heads % tp == 0:
            for ep in expert_degrees(num_ranks, num_experts):
                yield ExpertGrid(tp, num_ranks // tp, ep)
