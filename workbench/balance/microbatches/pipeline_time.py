"""Iteration time of 1F1B on a chain, by its compiled recurrence, and a lower bound for equal microbatches."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from workbench.compiled import compiled

Seconds = NDArray[np.float64]
Order = NDArray[np.int64]


@compiled
def first_stage_starts(forward_s: Seconds, backward_s: Seconds, order: Order) -> Seconds:
    """Return starts and ends of the backwards on the first stage of a 1F1B pipeline without communication.

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
    """As `first_stage_starts`, where stage s runs min(warmups[s], m) forwards before its first backward.

    The caller must give `warmups` [p] >= 1 that never rise along the chain; otherwise two stages wait for
    each other for ever.
    """
    num, stages = len(order), forward_s.shape[1]
    forward_end = np.zeros((stages, num))
    backward_end = np.zeros((stages, num))
    backwards = np.zeros((2, num))
    free_s = np.zeros(stages)
    done_f = np.zeros(stages, np.int64)
    done_b = np.zeros(stages, np.int64)
    num_left = 2 * num * stages
    while num_left > 0:
        for s in range(stages):
            while done_b[s] < num:
                warmup = min(warmups[s], num)
                is_forward = done_f[s] < num and done_f[s] < warmup + done_b[s]
                if is_forward:
                    index = done_f[s]
                    if s > 0 and done_f[s - 1] <= index:
                        break
                    ready_s = forward_end[s - 1, index] if s > 0 else 0.0
                    free_s[s] = max(free_s[s], ready_s) + forward_s[order[index], s]
                    forward_end[s, index] = free_s[s]
                    done_f[s] += 1
                else:
                    index = done_b[s]
                    if s < stages - 1 and done_b[s + 1] <= index:
                        break
                    ready_s = backward_end[s + 1, index] if s < stages - 1 else forward_end[s, index]
                    start_s = max(free_s[s], ready_s)
                    free_s[s] = start_s + backward_s[order[index], s]
                    backward_end[s, index] = free_s[s]
                    done_b[s] += 1
                    if s == 0:
                        backwards[0, index] = start_s
                        backwards[1, index] = free_s[s]
                num_left -= 1
    return backwards


def iteration_s(forward_s: Seconds, backward_s: Seconds, order: Order) -> float:
    """Return the seconds until the first stage's last backward ends. Arguments: `first_stage_starts`."""
    return float(first_stage_starts(forward_s, backward_s, order)[1, -1])


def least_pipeline_s(total_s: float, num_stages: int, rounds: int) -> float:
    """A lower bound on 1F1B, however T seconds of layers are cut into p stages.

    With m microbatches and stages of t_1 .. t_p seconds, stage j alone needs t_1 + .. + t_{j-1} + m t_j.
    The largest of these is smallest where t_{j+1} = (1 - 1/m) t_j: then it is T / (1 - (1 - 1/m)^p).

    Complexity: O(1).
    """
    return total_s / (1 - (1 - 1 / rounds) ** num_stages)


@cache
def pipeline_s(forward_s: tuple[float, ...], backward_s: tuple[float, ...], rounds: int) -> float:
    """Seconds of 1F1B over equal microbatches."""
    forward = np.tile(np.array(forward_s), (rounds, 1))
    backward = np.tile(np.array(backward_s), (rounds, 1))
    return iteration_s(forward, backward, np.arange(rounds, dtype=np.int64))
