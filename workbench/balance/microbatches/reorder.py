"""Reorders samples over data-parallel groups, and microbatches over time, against stragglers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from workbench.balance.microbatches.pipeline_time import Order, Seconds, first_stage_starts
from workbench.balance.tokens.policies import Policy, longest_first
from workbench.compiled import compiled


def reorder_samples(
    size: Sequence[float], num_groups: int, policy: Policy = longest_first
) -> tuple[tuple[int, ...], ...]:
    """Assign samples to data-parallel groups: largest first, each to the least loaded group.

    Source: DistTrain, section 5.2, Algorithm 1 (INTRAREORDER).
    Differs: the printed rule may give groups unequal numbers of samples, which a fixed microbatch size
    cannot use; `tokens.longest_first_equal_counts` as the policy gives equal ones.

    Args:
        size: [n] work of each sample.
        num_groups: m.

    Returns:
        [m] samples of each group in descending size: the printed sequence is their concatenation.

    Complexity: O(n log m) after sorting.
    """
    owners = policy(size, num_groups)
    return tuple(
        tuple(sorted(map(int, np.flatnonzero(owners == group)), key=lambda sample: (-size[sample], sample)))
        for group in range(num_groups)
    )


def reorder_microbatches(forward_s: ArrayLike, backward_s: ArrayLike) -> tuple[int, ...]:
    """Order the smallest first, the p - 1 next smallest last, and fill every interval between them best.

    Source: DistTrain, section 5.3, Algorithm 2 (INTERREORDER, GETINTERVAL, SELECTCLOSEST). Interval i is
    the gap on the first stage before backward i: the first is filled by forwards 2 to p, interval i by
    forward i + p - 1.
    Differs: the printed loop runs l - p times and would emit l + p - 2 microbatches; it ends here when
    none is left. Size is the forward time on the first stage. Interval i is computed with the
    microbatches placed so far, of which backward i needs no others. SELECTCLOSEST of several is
    greedy, as the text says: the largest that still fits, then the nearest.

    Args:
        forward_s, backward_s: [l, p] seconds of every microbatch on every stage of the chain.

    Returns:
        [l] microbatches in execution order.

    Complexity: O(l^2 p); the incremental recurrence of the paper would save a factor of l / p.
    """
    forward, backward = time_matrices(forward_s, backward_s)
    num, stages = forward.shape
    smallest_first = [int(index) for index in np.argsort(forward[:, 0], kind="stable")]
    order, rear, rest = smallest_first[:1], smallest_first[1:stages], smallest_first[stages:]
    interval = 0
    while rest:
        starts, ends = first_stage_starts(forward, backward, np.array(order))
        last_end_s = ends[interval - 1] if interval else forward[order[0], 0]
        gap_s = starts[interval] - last_end_s if interval < len(order) else 0.0
        for _ in range(stages - 1 if interval == 0 else 1):
            if rest:
                chosen = min(rest, key=lambda index: (abs(forward[index, 0] - gap_s), index))
                rest.remove(chosen)
                order.append(chosen)
                gap_s -= forward[chosen, 0]
        interval += 1
    assert len(order) + len(rear) == num
    return (*order, *rear)


def reorder_by_exchanges(forward_s: ArrayLike, backward_s: ArrayLike) -> tuple[int, ...]:
    """Exchange two microbatches of the printed order as long as that shortens the iteration.

    Ours: the recurrence of the whole pipeline judges, not one stage's gaps. Never slower than
    `reorder_microbatches` or than the given order. Arguments and result as there.

    Complexity: O(l^3 p) a round, compiled; rounds end at the first that finds nothing.
    """
    forward, backward = time_matrices(forward_s, backward_s)
    starts = (np.arange(len(forward)), np.array(reorder_microbatches(forward, backward)))
    best = min((_exchange(forward, backward, start) for start in starts), key=lambda result: result[1])
    return tuple(int(index) for index in best[0])


@compiled
def _exchange(forward_s: Seconds, backward_s: Seconds, start: Order) -> tuple[Order, float]:
    order = start.copy()
    best_s = first_stage_starts(forward_s, backward_s, order)[1, -1]
    improved = True
    while improved:
        improved = False
        for first in range(len(order)):
            for second in range(first + 1, len(order)):
                order[first], order[second] = order[second], order[first]
                time_s = first_stage_starts(forward_s, backward_s, order)[1, -1]
                if time_s < best_s * (1 - 1e-12):
                    best_s = time_s
                    improved = True
                else:
                    order[first], order[second] = order[second], order[first]
    return order, best_s


def time_matrices(forward_s: ArrayLike, backward_s: ArrayLike) -> tuple[Seconds, Seconds]:
    """Return both as [microbatches, stages] arrays; ValueError unless they hold seconds."""
    forward, backward = np.asarray(forward_s, float), np.asarray(backward_s, float)
    if forward.ndim != 2 or forward.shape != backward.shape or 0 in forward.shape:
        raise ValueError(
            f"want [microbatches, stages] seconds of both passes, got {forward.shape} and {backward.shape}"
        )
    if not (
        np.isfinite(forward).all() and np.isfinite(backward).all() and min(forward.min(), backward.min()) >= 0
    ):
        raise ValueError("seconds of passes must be >= 0 and finite")
    return forward, backward
