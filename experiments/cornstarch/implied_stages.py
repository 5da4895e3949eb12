"""Stage counts that printed per-stage times imply: cutting a module differently moves no work."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImpliedStages:
    """Stage counts in the order of the times, and max / min - 1 of count x time."""

    counts: tuple[int, ...]
    spread: float


def implied_stages(
    stage_times: Sequence[float], *, max_stages: int, max_spread: float
) -> ImpliedStages | None:
    """The first of `all_implied_stages`: the smallest counts; None where no counts fit."""
    return next(all_implied_stages(stage_times, max_stages=max_stages, max_spread=max_spread), None)


def all_implied_stages(
    stage_times: Sequence[float], *, max_stages: int, max_spread: float
) -> Iterator[ImpliedStages]:
    """Stage counts, the smallest first, under which all rows give the module the same total time.

    A module cut into k equal stages has stages of total / k, so with k_i stages of t_i each,
    k_i t_i is the same in every row that runs the same module on the same input and grid.
    Only ratios are known: larger counts are multiples of the smallest.

    Args:
        stage_times: [N] time of one stage in each row, any unit, > 0.
        max_stages: no count exceeds it.
        max_spread: what rounding to whole layers may do to the totals.

    Complexity: O(max_stages x N^2).
    """
    if not stage_times or min(stage_times) <= 0 or max_stages < 1:
        raise ValueError(f"want stage times > 0 and max_stages >= 1, got {stage_times} and {max_stages}")
    for anchor in range(1, max_stages + 1):
        found = _around(stage_times, anchor * max(stage_times), max_spread)
        if found is not None and max(found.counts) <= max_stages:
            yield found


def _around(stage_times: Sequence[float], total: float, max_spread: float) -> ImpliedStages | None:
    """Counts of least spread whose totals are at most `max_spread` apart, the slowest row's being `total`."""
    lowest_totals = sorted(
        {
            count * time
            for time in stage_times
            for count in range(math.ceil(total / (1 + max_spread) / time), math.floor(total / time) + 1)
        }
        | {total}
    )
    best: ImpliedStages | None = None
    for lowest in lowest_totals:
        counts = tuple(math.ceil(lowest / time * (1 - 1e-12)) for time in stage_times)
        totals = [count * time for count, time in zip(counts, stage_times, strict=True)]
        spread = max(totals) / min(totals) - 1
        if spread <= max_spread and (best is None or spread < best.spread):
            best = ImpliedStages(counts, spread)
    return best
