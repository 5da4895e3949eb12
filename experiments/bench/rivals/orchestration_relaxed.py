"""DistTrain's own choice of degrees: a convex program for every (tp, dp), rounded to degrees that fit."""

from collections.abc import Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from workbench.balance.orchestration.exact import (
    Option,
    evaluated,
    is_better,
    options_of,
    paces,
    why_nothing_fits,
)
from workbench.balance.orchestration.task import Orchestration, Task
from workbench.float_sum import float_sum


def orchestrate_relaxed(task: Task) -> Orchestration:
    """Search every (tp, dp) of all units with GPUs as real numbers in closed form, then round.

    Source: DistTrain, section 4.3. For given (tp, dp) the warm-up is constant, and the convex program
    min max(a/x, b/y, c/z) with x + y + z <= N has a closed solution: GPUs in proportion to the work,
    but for units whose memory demands more or whose layers are too few for as much.
    Rounding: each pp to the nearest, then stages off the least slowed unit until the GPUs suffice.

    Raises:
        ValueError: nothing fits, or GPUs of several kinds.

    Complexity: O(product over units of tp x dp choices).
    """
    if task.pools:
        raise ValueError("the relaxed orchestration takes GPUs of one kind; nearest: `orchestrate`")
    best: Orchestration | None = None
    for pace in paces(task):
        choices = []
        for unit in task.units:
            by_degrees: dict[tuple[int, int], list[Option]] = {}
            for option in options_of(task, unit, pace):
                by_degrees.setdefault((option.tp, option.dp), []).append(option)
            choices.append(list(by_degrees.values()))
        for combination in product(*choices):
            rounded = _rounded(task, combination)
            if rounded is not None:
                candidate = evaluated(task, pace, rounded)
                if best is None or is_better(candidate, best):
                    best = candidate
    if best is None:
        raise ValueError(why_nothing_fits(task))
    return best


def _rounded(task: Task, combination: Sequence[Sequence[Option]]) -> list[Option] | None:
    """Stage counts near the real-valued optimum of given (tp, dp); None where they cannot fit."""
    if sum(options[0].num_gpus for options in combination) > task.num_gpus:
        return None
    bounds = [
        StageBounds(one[0].stage_s * one[0].pp, one[0].tp * one[0].dp, one[0].pp, one[-1].pp)
        for one in combination
    ]
    relaxed = relaxed_stages(bounds, task.num_gpus)
    indices = [
        min(range(len(options)), key=lambda index: (abs(options[index].pp - pp), index))
        for options, pp in zip(combination, relaxed, strict=True)
    ]
    while sum(o[index].num_gpus for o, index in zip(combination, indices, strict=True)) > task.num_gpus:
        lowered = [unit for unit, index in enumerate(indices) if index > 0]
        unit = min(lowered, key=lambda u: (combination[u][indices[u] - 1].stage_s, u))
        indices[unit] -= 1
    return [options[index] for options, index in zip(combination, indices, strict=True)]


class StageBounds(NamedTuple):
    """One unit of given (tp, dp): seconds of its whole pipeline, GPUs per stage, least and most stages."""

    work_s: float
    gpus_per_stage: int
    least: int
    most: int


def relaxed_stages(units: Sequence[StageBounds], num_gpus: int) -> list[float]:
    """Real-valued stage counts that minimise the slowest stage, by bisection over its seconds.

    Source: DistTrain, section 4.3, which gives the convex program to a solver. Here: for a slowest stage
    of t seconds a unit wants work / t stages, clipped to its bounds; the least t whose stages suffice.

    Args:
        units: whose least stages fit.

    Returns:
        [U] stages; as few as that slowest stage needs.

    Complexity: O(60 U).
    """
    low_s, high_s = 0.0, max(unit.work_s / unit.least for unit in units)

    def stages(slowest_s: float) -> list[float]:
        return [
            min(max(unit.work_s / slowest_s if slowest_s else inf, unit.least), unit.most) for unit in units
        ]

    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        needed = float_sum(pp * unit.gpus_per_stage for pp, unit in zip(stages(middle_s), units, strict=True))
        low_s, high_s = (low_s, middle_s) if needed <= num_gpus else (middle_s, high_s)
    return stages(high_s) if high_s else [unit.least for unit in units]
