"""The Pareto front of plans by time, memory, dollars and GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Costs of a plan; less is better in each.

    Args:
        name: of the candidate.
        time_s: of a step.
        memory_bytes: of the fullest rank.
        gpus: used by the plan.
        dollars: of a step; None where the job has no prices.
    """

    name: str
    time_s: float
    memory_bytes: float
    gpus: float
    dollars: float | None = None

    @property
    def costs(self) -> tuple[float, ...]:
        """All known costs, always in the same order."""
        known = (self.time_s, self.memory_bytes, self.gpus)
        return known if self.dollars is None else (*known, self.dollars)


def front(points: Sequence[Point]) -> tuple[int, ...]:
    """Indices of the points that none dominates, fastest first; equal points are on the front together.

    A point dominates another if it costs no more in anything and less in something.

    Raises:
        ValueError: some points have dollars and others have none.
    """
    if len({point.dollars is None for point in points}) > 1:
        without_price = next(point.name for point in points if point.dollars is None)
        raise ValueError(f"Pareto front: want dollars of every plan or of none, {without_price!r} has none")
    return undominated([point.costs for point in points])


def undominated(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Indices of the rows that no other row dominates, in the order of their costs; ties by index.

    Only an earlier row in that order can dominate a row, and if any does, then one on the front does, since
    dominance is transitive.

    Args:
        costs: [n][d], d >= 1.

    Complexity: O(n x rows of the front x d), after sorting.
    """
    if not costs:
        return ()
    rows = np.asarray(costs, dtype=np.float64)
    front_rows = np.empty_like(rows)
    indices: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: (*rows[index], index)):
        front_so_far = front_rows[: len(indices)]
        no_more = (front_so_far <= rows[index]).all(axis=1)
        if not (no_more & (front_so_far < rows[index]).any(axis=1)).any():
            front_rows[len(indices)] = rows[index]
            indices.append(index)
    return tuple(indices)
