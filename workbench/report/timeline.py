"""Rows of a plan's timeline, and ticks of an axis."""

from dataclasses import dataclass
from math import floor, log10

from workbench.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """Ranks that hold the same stages; the picture shows the first of them."""

    rank: int
    ranks: tuple[int, ...]
    stages: tuple[int, ...]


def timeline_rows(plan: Plan) -> tuple[TimelineRow, ...]:
    """Ranks grouped by their stages, in order of their first rank."""
    stages_of: dict[int, tuple[int, ...]] = {}
    for stage in plan.stages:
        for rank in stage.flat_ranks:
            stages_of[rank] = (*stages_of.get(rank, ()), stage.id)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(stages_of):
        groups.setdefault(stages_of[rank], []).append(rank)
    return tuple(TimelineRow(rank=ranks[0], ranks=tuple(ranks), stages=s) for s, ranks in groups.items())


def nice_step(span: float, most: int) -> float:
    """The smallest step of the form 1, 2 or 5 times a power of ten that gives at most `most` steps."""
    if span <= 0 or most < 1:
        raise ValueError(f"axis: want a span > 0 and >= 1 step, got {span} and {most}")
    power = 10.0 ** floor(log10(span / most))
    return next(step * power for step in (1, 2, 5, 10, 20) if span / (step * power) <= most)
