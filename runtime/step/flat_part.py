"""One rank's part of weights that are one flat tensor, cut into equal parts, one a rank."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from torch import nn

Span = tuple[int, int]  # first element, and the one behind the last
ViewsOf = Callable[[nn.Parameter], Iterable[nn.Parameter]]

# Shape suffix: S = elements of one part.


@dataclass(frozen=True, slots=True, eq=False)
class CutWeight:
    """A weight in a flat tensor.

    Args:
        weight: whole.
        spans: its elements in the part of every rank.
        piece: view of those in this rank's part, in the weight's shape if they are all; None: there are none.
    """

    weight: nn.Parameter
    spans: tuple[Span, ...]
    piece: nn.Parameter | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlatPart:
    """A part, which an optimizer updates, and the weights that it is cut from.

    Args:
        own: [S] this rank's part.
        held: all weights, in their order in the flat tensor.
        ranks: that have the parts, in their order.
        member: index of this rank.
    """

    own: nn.Parameter
    held: tuple[nn.Parameter, ...]
    ranks: tuple[int, ...]
    member: int

    def cut_weights(self, views_of: ViewsOf = lambda weight: [weight]) -> Iterator[CutWeight]:
        """Yield the weights in their order, each with a new view of its piece.

        Args:
            views_of: a weight as the consecutive parts that are cut; by default whole.

        Complexity: O(parts of weights x ranks).
        """
        start, size = 0, self.own.numel()
        for weight in chain.from_iterable(map(views_of, self.held)):
            num = weight.numel()
            edges = [min(max(rank * size - start, 0), num) for rank in range(len(self.ranks) + 1)]
            spans = tuple(pairwise(edges))
            yield CutWeight(weight, spans, self._piece(weight, start, spans[self.member]))
            start += num

    def _piece(self, weight: nn.Parameter, start: int, span: Span) -> nn.Parameter | None:
        first, last = span
        if first == last:
            return None
        values = self.own.detach().narrow(0, start + first - self.member * self.own.numel(), last - first)
        return nn.Parameter(values.view_as(weight) if last - first == weight.numel() else values)
