"""What every plan of a search costs, as points, and which of them no other beats."""

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.search.objectives.pareto import Point, front

Record = Mapping[str, Any]


def points_of(candidates: Sequence[Record]) -> tuple[Point, ...]:
    """Of the candidates' records, those that have a plan and a memory, in their order.

    Dollars are there where every one has them.
    """
    planned = [each for each in candidates if "plan_hash" in each and each["peak_bytes"] is not None]
    has_price = all("dollars_per_sample" in each for each in planned)
    return tuple(
        Point(
            name=each["strategy"],
            time_s=each["step_s"],
            memory_bytes=each["peak_bytes"],
            gpus=each["ranks"],
            dollars=each["dollars_per_sample"] * each["samples"] if has_price else None,
        )
        for each in planned
    )


def front_names(candidates: Sequence[Record]) -> list[str]:
    """The candidates on the Pareto front, the fastest first; equal ones together."""
    points = points_of(candidates)
    return [points[place].name for place in front(points)]
