"""Collectives that ranks begin beside their passes: they meet in order, or nobody ever comes out."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from experiments.fidelity.mutant_meaning import Key
from experiments.fidelity.mutant_verdict import Stalled


class LaneKind(StrEnum):
    """GATHER: parts of weights to all. DEAL: gradients, a part to each. SUM: of a gradient group."""

    GATHER = "gather"
    DEAL = "deal"
    SUM = "sum"


class What(NamedTuple):
    """What ranks do together: a unit of sharded weights, by its layers, or a gradient group."""

    kind: LaneKind
    of: tuple[str, int, int] | int


Brought = Mapping[Key, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    what: What
    ranks: tuple[int, ...]
    brought: Brought


@dataclass(frozen=True, slots=True)
class Ended:
    """A collective that all its ranks came to, and what each brought."""

    what: What
    brought: Mapping[int, Brought]


class Lanes:
    """What every rank has begun and not ended.

    A rank has two lanes, of exchanges and of sums, each of which does one thing at a time. Ranks have a
    channel for either: what one of them sends first the others take first, whatever it is.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, bool], deque[_Begun]] = {}
        self._ranks: dict[tuple[tuple[int, ...], bool], None] = {}  # of channels, an ordered set

    def begin(self, rank: int, what: What, ranks: tuple[int, ...], brought: Brought) -> None:
        """One rank comes to a collective of `ranks`, itself among them."""
        is_sum = what.kind is LaneKind.SUM
        self._lanes.setdefault((rank, is_sum), deque()).append(_Begun(what, ranks, brought))
        self._ranks[ranks, is_sum] = None

    def advance(self) -> list[Ended]:
        """End all that can end now.

        Raises:
            Stalled: ranks meet at different things, which never end.
        """
        ended: list[Ended] = []
        for ranks, is_sum in self._ranks:
            while (found := self._next(ranks, is_sum=is_sum)) is not None:
                ended.append(found)
        return ended

    def _next(self, ranks: tuple[int, ...], *, is_sum: bool) -> Ended | None:
        queues = [self._lanes.get((rank, is_sum)) for rank in ranks]
        heads = [queue[0] for queue in queues if queue and queue[0].ranks == ranks]
        if len({head.what for head in heads}) > 1:
            raise Stalled(f"ranks {ranks} meet at {heads[0].what.of} and at {heads[-1].what.of}")
        if len(heads) < len(ranks):
            return None
        for rank in ranks:
            self._lanes[rank, is_sum].popleft()
        return Ended(heads[0].what, {rank: head.brought for rank, head in zip(ranks, heads, strict=True)})

    def stuck(self) -> str:
        """What the ranks that wait are at; empty where nobody does."""
        heads = [(rank, queue[0]) for (rank, _), queue in self._lanes.items() if queue]
        return "; ".join(f"rank {rank} in {h.what.kind} {h.what.of} of {h.ranks}" for rank, h in heads[:4])
