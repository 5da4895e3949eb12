"""The plans that no other plan beats in everything: the Pareto front of time, memory, dollars and GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a plan costs; less is better in everything.

    Args:
        name: of the candidate.
        time_s: of a step.
        memory_bytes: of the fullest rank.
        gpus: that it uses.
        dollars: of a step; None where the job has no prices.
    """

    name: str
    time_s: float
    memory_bytes: float
    gpus: float
    dollars: float | None = None

    @property
    def costs(self) -> tuple[float, ...]:
        """All that are known, always in the same order."""
        known = (self.time_s, self.memory_bytes, self.gpus)
        return known if self.dollars is None else (*known, self.dollars)


def front(points: Sequence[Point]) -> tuple[int, ...]:
    """Places of the points that none dominates, the fastest first; equal points stand on it together.

    A point dominates another if it costs no more in anything and less in something.

    Raises:
        ValueError: some points have dollars and others have none.
    """
    if len({point.dollars is None for point in points}) > 1:
        lacking = next(point.name for point in points if point.dollars is None)
        raise ValueError(f"Pareto front: want dollars of every plan or of none, {lacking!r} has none")
    return undominated([point.costs for point in points])


def undominated(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Places of the rows that no other row dominates, in the order of their costs; ties by place.

    Only a row that stands before it in that order can dominate a row, and of these one on the front does
    if any does, since dominance is transitive.

    Args:
        costs: [n][d], d >= 1.

    Complexity: O(n x rows of the front x d), after sorting.
    """
    if not costs:
        return ()
    rows = np.asarray(costs, dtype=np.float64)
    kept = np.empty_like(rows)
    places: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: (*rows[index], index)):
        before = kept[: len(places)]
        no_more = (before <= rows[index]).all(axis=1)
        if not (no_more & (before < rows[index]).any(axis=1)).any():
            kept[len(places)] = rows[index]
            places.append(index)
    return tuple(places)
