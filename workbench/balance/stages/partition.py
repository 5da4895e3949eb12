"""Contiguous partition of a chain of layers into stages with the smallest bottleneck."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor

import numpy as np

Cuts = tuple[tuple[int, int], ...]


def partition(cost_s: Sequence[float], num_stages: int) -> Cuts:
    """Cut N layers into K non-empty stages with the smallest bottleneck, as even as that allows.

    The objective is that of Cornstarch (ICML) Eq. 5-6: minimise the cost of the slowest stage.
    Found by Nicol's parametric search (Nicol 1994, "Rectilinear partitioning of irregular data
    parallel computations", J. Parallel Distrib. Comput. 23): every bottleneck is the cost of a
    run of layers, and whether one suffices is a greedy walk.
    Differs: among the partitions with that bottleneck the paper's backtracking takes the earliest
    cuts; here the sum of squared stage costs is smallest, ties going to the earliest cuts from
    the last stage back. `partition_as_printed` is the paper's.

    Args:
        cost_s: [N] seconds of one forward and one backward of each layer, each >= 0.
        num_stages: K.

    Returns:
        [K] half-open runs (first, end) of layers, in order.

    Raises:
        ValueError: K < 1, K > N, or a negative or non-finite cost.

    Complexity: O((K log N)^2) for the bottleneck; evening out is O(N^2 K) in the worst case,
        vectorised, and touches only the cuts that the bottleneck leaves open.
    """
    chain = _LayerChain(cost_s)
    chain.require(num_stages)
    return _evened(chain, num_stages, chain.bottleneck(num_stages))


def bottleneck_s(cost_s: Sequence[float], num_stages: int) -> float:
    """Return the cost of the slowest stage of `partition`, without the partition.

    Same arguments and errors. Complexity: O((K log N)^2) after O(N).
    """
    chain = _LayerChain(cost_s)
    chain.require(num_stages)
    return float(Fraction(chain.bottleneck(num_stages), chain.units_per_s))


def partition_min_stages(cost_s: Sequence[float], target_s: float) -> Cuts:
    """Cut N layers into the fewest stages that cost at most `target_s` each.

    What Cornstarch (arXiv v1) Algorithm 1 asks of an encoder, `get_parallel_model(e,
    target_stage_time)`. The count is the greedy one, which is the fewest; the cuts are those of
    `partition` for that count.

    Raises:
        ValueError: a layer that costs more than `target_s` on its own.

    Complexity: O(N) for the count, then that of `partition`.
    """
    chain = _LayerChain(cost_s)
    slowest = max(range(len(cost_s)), key=cost_s.__getitem__)
    if not cost_s[slowest] <= target_s:
        raise ValueError(
            f"stages of at most {target_s} s: layer {slowest} alone costs {cost_s[slowest]} s, "
            "and a stage holds at least one layer"
        )
    within_s = min(target_s, 2 * len(cost_s) * cost_s[slowest])  # finite, and no limit on the whole chain
    num_stages = chain.fewest(floor(Fraction(within_s) * chain.units_per_s))
    assert num_stages is not None, "every single layer keeps the limit"
    return _evened(chain, num_stages, chain.bottleneck(num_stages))


def partition_as_printed(cost_s: Sequence[float], num_stages: int) -> Cuts:
    """Partition by the dynamic programme of Cornstarch (ICML) section 4.1, Eq. 5-6, with its backtracking.

    X[i][0] = w(0, i); X[i][k] = min over j in [k, i] of max(X[j][k-1], w(j, i)), where X[i][k] is
    the bottleneck of the first i layers in k + 1 stages and w(j, i) the cost of layers j..i-1.
    The argmin is recorded and followed back from (N, K-1). The paper leaves ties open: the lowest j
    is taken, which never leaves a stage empty although j = i is among the choices.

    Arguments, result and errors are those of `partition`.

    Complexity: O(N^2 K) time, O(N K) space.
    """
    chain = _LayerChain(cost_s)
    chain.require(num_stages)
    num_layers, prefix = chain.num_layers, chain.prefix
    best = [[prefix[i]] for i in range(num_layers + 1)]
    cut = [[0] for _ in range(num_layers + 1)]
    for k in range(1, num_stages):
        for i in range(num_layers + 1):
            value, where = prefix[-1] + 1, k
            for j in range(k, i + 1):
                bottleneck = max(best[j][k - 1], prefix[i] - prefix[j])
                if bottleneck < value:
                    value, where = bottleneck, j
            best[i].append(value)
            cut[i].append(where)
    ends = [num_layers]
    for k in range(num_stages - 1, 0, -1):
        ends.append(cut[ends[-1]][k])
    ends.append(0)
    ends.reverse()
    return tuple(pairwise(ends))


class _LayerChain:
    """Prefix sums of one problem and the questions asked of them.

    Costs are counted in whole units of a power of two of a second, so that sums are exact and the
    cost of a run of layers does not depend on where the chain begins.
    """

    def __init__(self, cost_s: Sequence[float]) -> None:
        self.num_layers = len(cost_s)
        if not self.num_layers:
            raise ValueError("a partition needs at least one layer, got none")
        for layer, cost in enumerate(cost_s):
            if not 0 <= cost < float("inf"):
                raise ValueError(f"layer {layer}: cost must be finite and >= 0, got {cost} s")
        ratios = [float(cost).as_integer_ratio() for cost in cost_s]
        self.units_per_s = max(denominator for _, denominator in ratios)
        units = (numerator * (self.units_per_s // denominator) for numerator, denominator in ratios)
        self.prefix = [0, *accumulate(units)]

    def require(self, num_stages: int) -> None:
        """Raise unless that many stages are possible."""
        if num_stages < 1:
            raise ValueError(f"num_stages must be >= 1, got {num_stages}")
        if num_stages > self.num_layers:
            raise ValueError(
                f"{num_stages} stages out of {self.num_layers} layers: want at most {self.num_layers} stages"
            )

    def cost(self, first: int, end: int) -> int:
        return self.prefix[end] - self.prefix[first]

    def reach(self, first: int, limit: int) -> int:
        """Return the furthest end of a stage from `first` that keeps the limit."""
        return bisect_right(self.prefix, self.prefix[first] + limit) - 1

    def fewest(self, limit: int, first: int = 0, most: int | None = None) -> int | None:
        """Return the stages of the greedy walk from `first` on; None when stuck or more than `most`."""
        stages = 0
        while first < self.num_layers:
            end = self.reach(first, limit)
            stages += 1
            if end == first or (most is not None and stages > most):
                return None
            first = end
        return stages

    def bottleneck(self, num_stages: int) -> int:
        """Return Nicol's bottleneck: at every stage, the shortest run whose cost is enough for the rest.

        At most K stages is as good as exactly K: cutting a stage in two never costs more.
        """
        best, first = self.prefix[-1], 0
        for num_left in range(num_stages, 0, -1):
            end = self._shortest_sufficient(first, num_left)
            best = min(best, self.cost(first, end))
            first = max(first, end - 1)
        return best

    def _shortest_sufficient(self, first: int, num_left: int) -> int:
        def suffices(end: int) -> bool:
            return self.fewest(self.cost(first, end), first, num_left) is not None

        ends = range(first, self.num_layers + 1)
        return ends[bisect_left(ends, 1, key=suffices)]

    def start_for(self, end: int, limit: int) -> int:
        """Return the earliest start of a stage that ends at `end` and keeps the limit."""
        return bisect_left(self.prefix, self.prefix[end] - limit)


def _evened(chain: _LayerChain, num_stages: int, limit: int) -> Cuts:
    """Return the partition with the smallest sum of squares among those that keep `limit`."""
    windows = _windows(chain, num_stages, limit)
    prefix = np.array([units / chain.units_per_s for units in chain.prefix])
    best = np.zeros(1)
    cut: list[np.ndarray[tuple[int], np.dtype[np.intp]]] = []
    for (low_j, high_j), (low_i, high_i) in pairwise(windows):
        j, i = np.arange(low_j, high_j + 1)[:, None], np.arange(low_i, high_i + 1)[None, :]
        starts = np.array([chain.start_for(end, limit) for end in range(low_i, high_i + 1)])
        cost = prefix[i] - prefix[j]
        allowed = (starts[None, :] <= j) & (j < i)
        total = np.where(allowed, best[:, None] + cost * cost, np.inf)
        where = total.argmin(axis=0)
        cut.append(where + low_j)
        best = total.min(axis=0)
    ends = [chain.num_layers]
    for where, (low, _) in zip(reversed(cut), reversed(windows[1:]), strict=True):
        ends.append(int(where[ends[-1] - low]))
    ends.reverse()
    return tuple(pairwise(ends))


def _windows(chain: _LayerChain, num_stages: int, limit: int) -> list[tuple[int, int]]:
    """[K + 1] (lowest, highest) position of each cut, so that both sides of it are possible."""
    highest = [0]
    for k in range(1, num_stages + 1):
        highest.append(min(chain.reach(highest[-1], limit), chain.num_layers - num_stages + k))
    lowest = [chain.num_layers]
    for k in range(num_stages - 1, -1, -1):
        lowest.append(max(chain.start_for(lowest[-1], limit), k))
    return list(zip(reversed(lowest), highest, strict=True))
