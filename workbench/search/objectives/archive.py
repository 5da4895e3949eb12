"""Of many candidates those that no other beats by more than a little, kept while they come.

Source: Laumanns, Thiele, Deb and Zitzler 2002, "Combining convergence and diversity in evolutionary
multiobjective optimization", Evolutionary Computation 10(3) (epsilon-dominance by boxes).
Differs: boxes grow when there are too many.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import floor, log, log1p
from typing import Generic, TypeVar

Kept = TypeVar("Kept")
Costs = tuple[float, ...]
Box = tuple[int, ...]
SHARE = 0.01
MOST = 40


@dataclass(slots=True)
class Archive(Generic[Kept]):
    """Items by their costs, of which less is better.

    Costs lie in boxes that are wide by a share of them. Of a box one item is kept, and none of a box that
    another one beats; so for whatever was added one is kept that costs about the share more at most, in
    everything. What is kept depends on the order in which it was added, and on nothing else.

    Args:
        share: of a cost, > 0; twice as much each time that there are more than `most`.
        most: items that are kept, >= 1.
    """

    share: float = SHARE
    most: int = MOST
    _held: dict[Box, tuple[Costs, Kept]] = field(default_factory=dict)

    def add(self, costs: Costs, kept: Kept) -> None:
        """One more; O(items x costs).

        Args:
            costs: > 0, as many each time.
        """
        self._put(costs, kept)
        while len(self._held) > self.most:
            self.share *= 2
            held, self._held = list(self._held.values()), {}
            for each in held:
                self._put(*each)

    def __iter__(self) -> Iterator[Kept]:
        """What is kept, by its costs."""
        return (kept for _, kept in sorted(self._held.values(), key=lambda each: each[0]))

    def _put(self, costs: Costs, kept: Kept) -> None:
        box = tuple(floor(log(cost) / log1p(self.share)) for cost in costs)
        if box in self._held:
            if costs != self._held[box][0] and _no_more(costs, self._held[box][0]):
                self._held[box] = costs, kept
            return
        if any(_no_more(other, box) for other in self._held):
            return
        self._held = {other: each for other, each in self._held.items() if not _no_more(box, other)}
        self._held[box] = costs, kept


def _no_more(costs: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return all(own <= other for own, other in zip(costs, others, strict=True))
