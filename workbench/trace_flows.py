"""Which pass an exchange of sharded weights is for, in a trace: arrows that a viewer draws between them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from workbench.schedule.action import COMPUTE, Pass
from workbench.trace import Span, Trace


class Flow(NamedTuple):
    """What one span gives another on the same rank.

    Args:
        name: of what is given.
        giver: gathered weights, or the pass that has gradients.
        taker: the pass that needs the weights, or the sum of the gradients.
    """

    name: str
    giver: Span
    taker: Span


def exchange_flows(trace: Trace) -> Iterator[Flow]:
    """An all-gather gives the stage's next pass weights, the pass before a reduce-scatter gives it gradients.

    An exchange that has no such pass gives nothing. In the order of the exchanges in the trace.

    Complexity: O(spans log spans).
    """
    passes: dict[tuple[int, int | None], list[Span]] = {}
    for span in trace.spans:
        if span.action.kind in COMPUTE:
            passes.setdefault((span.rank, span.action.stage), []).append(span)
    for own in passes.values():
        own.sort(key=lambda span: span.start_s)
    for span in trace.spans:
        own = passes.get((span.rank, span.action.stage), [])
        if span.action.kind is Pass.ALL_GATHER:
            place = bisect_left(own, span.end_s, key=lambda other: other.start_s)
            if place < len(own):
                yield Flow("weights", span, own[place])
        elif span.action.kind is Pass.REDUCE_SCATTER:
            place = bisect_right(own, span.start_s, key=lambda other: other.end_s)
            if place > 0:
                yield Flow("gradients", own[place - 1], span)
