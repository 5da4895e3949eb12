"""Iteration time of 1F1B on a chain whose microbatches differ, by its recurrence; compiled."""

import numpy as np
from numpy.typing import NDArray

from workbench.compiled import compiled

Seconds = NDArray[np.float64]
Order = NDArray[np.int64]


@compiled
def first_stage_starts(forward_s: Seconds, backward_s: Seconds, order: Order) -> Seconds:
    """Starts and ends of the backwards on the first stage of a 1F1B pipeline without communication.

    Stage s of p runs min(p - s, m) forwards, then alternates backward and forward, then drains; each
    pass waits for the one before it on its stage and for its input.

    Args:
        forward_s, backward_s: [M, p] seconds by microbatch and stage.
        order: [m] the microbatches that run, in order.

    Returns:
        [2, m] start and end of every backward on stage 0; the last end is the iteration time.

    Complexity: O(m p) time and space.
    """
    stages = forward_s.shape[1]
    return eager_starts(forward_s, backward_s, order, np.arange(stages, 0, -1))


@compiled
def eager_starts(forward_s: Seconds, backward_s: Seconds, order: Order, warmups: Order) -> Seconds:
    """The same where stage s runs min(warmups[s], m) forwards before its first backward.

    `warmups` [p] must be >= 1 and never rise along the chain, or two stages wait for each other for
    ever; the caller sees to that.
    """
    num, stages = len(order), forward_s.shape[1]
    forward_end = np.zeros((stages, num))
    backward_end = np.zeros((stages, num))
    found = np.zeros((2, num))
    free_s = np.zeros(stages)
    done_f = np.zeros(stages, np.int64)
    done_b = np.zeros(stages, np.int64)
    left = 2 * num * stages
    while left > 0:
        for s in range(stages):
            while done_b[s] < num:
                warmup = min(warmups[s], num)
                is_forward = done_f[s] < num and done_f[s] < warmup + done_b[s]
                if is_forward:
                    at = done_f[s]
                    if s > 0 and done_f[s - 1] <= at:
                        break
                    ready_s = forward_end[s - 1, at] if s > 0 else 0.0
                    free_s[s] = max(free_s[s], ready_s) + forward_s[order[at], s]
                    forward_end[s, at] = free_s[s]
                    done_f[s] += 1
                else:
                    at = done_b[s]
                    if s < stages - 1 and done_b[s + 1] <= at:
                        break
                    ready_s = backward_end[s + 1, at] if s < stages - 1 else forward_end[s, at]
                    start_s = max(free_s[s], ready_s)
                    free_s[s] = start_s + backward_s[order[at], s]
                    backward_end[s, at] = free_s[s]
                    done_b[s] += 1
                    if s == 0:
                        found[0, at] = start_s
                        found[1, at] = free_s[s]
                left -= 1
    return found


def iteration_s(forward_s: Seconds, backward_s: Seconds, order: Order) -> float:
    """Seconds until the first stage's last backward ends. Arguments: `first_stage_starts`."""
    return float(first_stage_starts(forward_s, backward_s, order)[1, -1])
