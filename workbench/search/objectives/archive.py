"""An archive of candidates that no other one beats by more than a little, maintained online.

Source: Laumanns, Thiele, Deb and Zitzler 2002, "Combining convergence and diversity in evolutionary
multiobjective optimization", Evolutionary Computation 10(3) (epsilon-dominance by boxes). Differs: boxes
grow when there are too many.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import floor, log, log1p
from typing import Generic, TypeVar

Item = TypeVar("Item")
Costs = tuple[float, ...]
Box = tuple[int, ...]
SHARE = 0.01
MOST = 40


@dataclass(slots=True)
class Archive(Generic[Item]):
    """Items by their costs, of which less is better.

    Costs are divided into boxes whose width is a share of the cost. Each box keeps one item, and none if
    another box dominates it; so for every item added, one is kept that costs at most about that share more,
    in every dimension. The result depends on the order of insertion and on nothing else.

    Args:
        share: relative width of a box, > 0; doubled each time that there are more than `most` items.
        most: items to keep, >= 1.
    """

    share: float = SHARE
    most: int = MOST
    _boxes: dict[Box, tuple[Costs, Item]] = field(default_factory=dict)

    def add(self, costs: Costs, item: Item) -> None:
        """Add an item; O(items x costs).

        Args:
            costs: > 0, equally many in every call.
        """
        self._put(costs, item)
        while len(self._boxes) > self.most:
            self.share *= 2
            entries, self._boxes = list(self._boxes.values()), {}
            for entry in entries:
                self._put(*entry)

    def __iter__(self) -> Iterator[Item]:
        """The items, ordered by their costs."""
        return (kept for _, kept in sorted(self._boxes.values(), key=lambda each: each[0]))

    def _put(self, costs: Costs, item: Item) -> None:
        box = tuple(floor(log(cost) / log1p(self.share)) for cost in costs)
        if box in self._boxes:
            if costs != self._boxes[box][0] and _weakly_dominates(costs, self._boxes[box][0]):
                self._boxes[box] = costs, item
            return
        if any(_weakly_dominates(other, box) for other in self._boxes):
            return
        self._boxes = {
            other: entry for other, entry in self._boxes.items() if not _weakly_dominates(box, other)
        }
        self._boxes[box] = costs, item


def _weakly_dominates(costs: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return all(cost <= other_cost for cost, other_cost in zip(costs, others, strict=True))
