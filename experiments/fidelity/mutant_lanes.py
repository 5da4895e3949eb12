"""Collectives that ranks start beside their passes: they must meet in order, or they never complete."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from experiments.fidelity.mutant_meaning import Key
from experiments.fidelity.mutant_verdict import Stalled


class LaneKind(StrEnum):
    """GATHER: all-gather of weights. DEAL: reduce-scatter of gradients. SUM: all-reduce of a group."""

    GATHER = "gather"
    DEAL = "deal"
    SUM = "sum"


class Subject(NamedTuple):
    """What a collective is about: a unit of sharded weights, by its layers, or a gradient group."""

    kind: LaneKind
    of: tuple[str, int, int] | int


Contribution = Mapping[Key, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    subject: Subject
    ranks: tuple[int, ...]
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Ended:
    """A collective that all its ranks have joined, with each one's contribution."""

    subject: Subject
    contributions: Mapping[int, Contribution]


class Lanes:
    """Collectives that ranks have begun and not finished.

    A rank has two lanes, one for exchanges and one for sums, each with one collective at a time. The ranks
    of a collective share a channel per lane, which is first in, first out whatever the subject.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, bool], deque[_Begun]] = {}
        self._ranks: dict[tuple[tuple[int, ...], bool], None] = {}  # of channels, an ordered set

    def begin(self, rank: int, subject: Subject, ranks: tuple[int, ...], contribution: Contribution) -> None:
        """Let one rank join a collective of `ranks`, which include it."""
        is_sum = subject.kind is LaneKind.SUM
        self._lanes.setdefault((rank, is_sum), deque()).append(_Begun(subject, ranks, contribution))
        self._ranks[ranks, is_sum] = None

    def advance(self) -> list[Ended]:
        """Finish every collective that can finish now.

        Raises:
            Stalled: ranks meet at different collectives, which never finish.
        """
        ended: list[Ended] = []
        for ranks, is_sum in self._ranks:
            while (collective := self._next(ranks, is_sum=is_sum)) is not None:
                ended.append(collective)
        return ended

    def _next(self, ranks: tuple[int, ...], *, is_sum: bool) -> Ended | None:
        queues = [self._lanes.get((rank, is_sum)) for rank in ranks]
        heads = [queue[0] for queue in queues if queue and queue[0].ranks == ranks]
        if len({head.subject for head in heads}) > 1:
            raise Stalled(f"ranks {ranks} meet at {heads[0].subject.of} and at {heads[-1].subject.of}")
        if len(heads) < len(ranks):
            return None
        for rank in ranks:
            self._lanes[rank, is_sum].popleft()
        return Ended(
            heads[0].subject, {rank: head.contribution for rank, head in zip(ranks, heads, strict=True)}
        )

    def stuck(self) -> str:
        """The collectives that waiting ranks are at; empty where none waits."""
        heads = [(rank, queue[0]) for (rank, _), queue in self._lanes.items() if queue]
        return "; ".join(
            f"rank {rank} in {h.subject.kind} {h.subject.of} of {h.ranks}" for rank, h in heads[:4]
        )
