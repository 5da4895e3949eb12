"""Seconds of 1F1B over equal microbatches, and a lower bound for any cut into stages."""

from functools import cache

import numpy as np

from workbench.balance.microbatches.pipeline_time import iteration_s


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
