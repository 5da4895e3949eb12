"""Costs of a search's plans as points, and their Pareto front."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

from workbench.search.objectives.pareto import Point, front

Record = Mapping[str, Any]


def points_of(candidates: Sequence[Record]) -> tuple[Point, ...]:
    """Points of the candidates' records that have a plan and a memory, in their order.

    Dollars are included if all have them.

    Raises:
        ValueError: a figure that is no number >= 0.
        KeyError, TypeError: records of something else.
    """
    planned = [each for each in candidates if "plan_hash" in each and each["peak_bytes"] is not None]
    has_price = all("dollars_per_sample" in each for each in planned)
    return tuple(
        Point(
            name=str(each["strategy"]),
            time_s=_number(each, "step_s"),
            memory_bytes=_number(each, "peak_bytes"),
            gpus=_number(each, "ranks"),
            dollars=_number(each, "dollars_per_sample") * _number(each, "samples") if has_price else None,
        )
        for each in planned
    )


class Tied(NamedTuple):
    """Points of a front with equal costs."""

    names: tuple[str, ...]
    point: Point


def tied_front(points: Sequence[Point]) -> tuple[Tied, ...]:
    """The Pareto front, the fastest first; points with equal costs are grouped."""
    on_front = [points[index] for index in front(points)]
    groups = (list(tied) for _, tied in groupby(on_front, key=lambda point: point.costs))
    return tuple(Tied(tuple(point.name for point in tied), tied[0]) for tied in groups)


def _number(record: Record, name: str) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)


def front_names(candidates: Sequence[Record]) -> list[str]:
    """Names of the candidates on the Pareto front, the fastest first; equal ones together."""
    points = points_of(candidates)
    return [points[index].name for index in front(points)]
