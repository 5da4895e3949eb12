"""Two textbook heuristics for even loads, as yardsticks of token distribution. Plain Python, not tuned."""

import heapq
from collections.abc import Sequence


def multifit(work: Sequence[int], num_ranks: int) -> int:
    """Work of the heaviest rank by MULTIFIT: the least capacity at which first fit decreasing fits.

    Coffman, Garey and Johnson 1978, "An application of bin-packing to multiprocessor scheduling",
    SIAM J. Comput. 7(1). The search halves down to whole units. O(B G) per capacity.
    """
    decreasing = sorted(work, reverse=True)
    low = max(decreasing[0], -(-sum(decreasing) // num_ranks))
    high = 2 * low  # always enough for first fit decreasing
    best = high
    while low < high:
        capacity = (low + high) // 2
        heaviest = _first_fit(decreasing, capacity, num_ranks)
        if heaviest is None:
            low = capacity + 1
        else:
            high, best = capacity, heaviest
    return best


def differencing(work: Sequence[int], num_ranks: int) -> int:
    """Work of the heaviest rank by the largest differencing method, on all ranks at once.

    Karmarkar and Karp 1982, "The differencing method of set partitioning", UCB/CSD 82/113: the two
    partial distributions of widest spread are added, heaviest ranks of one to lightest of the other.
    O(B G log G).
    """
    parts = [
        (-amount, index, [0] * (num_ranks - 1) + [amount])
        for index, amount in enumerate(sorted(work, reverse=True))
    ]
    heapq.heapify(parts)
    index = len(parts)
    while len(parts) > 1:
        one, other = heapq.heappop(parts)[2], heapq.heappop(parts)[2]
        loads = sorted(a + b for a, b in zip(one, reversed(other), strict=True))
        lightest = [load - loads[0] for load in loads]
        heapq.heappush(parts, (-lightest[-1], index, lightest))
        index += 1
    relative = parts[0][2]
    return relative[-1] + (sum(work) - sum(relative)) // num_ranks


def _first_fit(decreasing: Sequence[int], capacity: int, num_ranks: int) -> int | None:
    """Work of the heaviest rank, or None where the capacity is too small."""
    loads = [0] * num_ranks
    for amount in decreasing:
        for rank, load in enumerate(loads):
            if load + amount <= capacity:
                loads[rank] += amount
                break
        else:
            return None
    return max(loads)
