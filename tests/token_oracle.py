"""Oracles of token distribution: heapq, integer programming, every exchange there is, and known bounds."""

import heapq
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from workbench.balance.tokens.policies import checked_work


def greedy(work, order, num_ranks):
    """Blocks in the given order, each to the lightest rank; a heap of (load, rank)."""
    owners = [0] * len(work)
    lightest = [(0, rank) for rank in range(num_ranks)]
    for block in order:
        load, rank = heapq.heappop(lightest)
        owners[block] = rank
        heapq.heappush(lightest, (load + work[block], rank))
    return owners


def heaviest_first(work):
    return sorted(range(len(work)), key=lambda block: (-work[block], block))


def greedy_equal_counts(work, num_ranks):
    """Heaviest first, each to the lightest rank that has room; all ranks looked at for every block."""
    each, more = divmod(len(work), num_ranks)
    owners, loads, counts = [0] * len(work), [0] * num_ranks, [0] * num_ranks
    for block in heaviest_first(work):
        extras_used = sum(count > each for count in counts)
        open_ranks = [
            rank
            for rank in range(num_ranks)
            if counts[rank] < each or (counts[rank] == each and extras_used < more)
        ]
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        owners[block] = rank
        loads[rank] += work[block]
        counts[rank] += 1
    return owners


def loads_of(work, owners, num_ranks):
    return [sum(w for w, owner in zip(work, owners, strict=True) if owner == r) for r in range(num_ranks)]


def least_by_brute_force(work, num_ranks):
    return min(
        max(loads_of(work, owners, num_ranks)) for owners in product(range(num_ranks), repeat=len(work))
    )


def least_by_milp(work, num_ranks):
    """Equation 4 of the ICML paper (1 of v1), solved by HiGHS: minimise C over x[block, rank] and C."""
    num_blocks = len(work)
    num_x = num_blocks * num_ranks
    once = np.zeros((num_blocks, num_x + 1))
    within = np.zeros((num_ranks, num_x + 1))
    for block, rank in product(range(num_blocks), range(num_ranks)):
        once[block, block * num_ranks + rank] = 1
        within[rank, block * num_ranks + rank] = work[block]
    within[:, -1] = -1
    solved = milp(
        c=np.eye(num_x + 1)[-1],
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(within, -np.inf, 0)],
        integrality=np.r_[np.ones(num_x), 0],
        bounds=Bounds(0, np.r_[np.ones(num_x), np.inf]),
        options={"mip_rel_gap": 0},
    )
    assert solved.success, solved.message
    return round(solved.fun)


def best_exchange(work, owners, num_ranks, *, may_move):
    """Load of the heavier of both ranks after the best exchange with the heaviest rank."""
    loads = loads_of(work, owners, num_ranks)
    heavy = loads.index(max(loads))
    found = [loads[heavy]]
    for give, rank in product(range(len(work)), range(num_ranks)):
        if owners[give] != heavy or rank == heavy:
            continue
        taken = [work[block] for block in range(len(work)) if owners[block] == rank] + [0] * may_move
        found += [max(loads[heavy] - work[give] + t, loads[rank] + work[give] - t) for t in taken]
    return min(found)


def graham_longest_first(num_ranks):
    """Return a bound on the heaviest rank of `longest_first` over the least possible. Graham 1969."""
    return 4 / 3 - 1 / (3 * num_ranks)


def graham_unsorted(num_ranks):
    """Return the same bound of `longest_first_unsorted`. Graham 1966."""
    return 2 - 1 / num_ranks


def graham_additive(work, num_ranks):
    """Return a bound on the heaviest rank under any greedy order: mean + largest block.

    The bound that both Cornstarch papers quote beside their algorithm. The rank that ends up
    heaviest was the lightest, so at most even, when it got its last block.
    """
    loads = checked_work(work, num_ranks)
    return float(loads.sum()) / num_ranks + float(loads.max())


def random_variance(work, num_ranks):
    """Return the variance of one rank's work under `random_blocks`: sum(work**2) x (1/G) x (1 - 1/G)."""
    loads = checked_work(work, num_ranks).astype(np.float64)
    return float(np.square(loads).sum()) / num_ranks * (1 - 1 / num_ranks)
