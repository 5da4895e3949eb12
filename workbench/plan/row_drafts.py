"""Rows before they have numbers: copied from a replica to its equals, then put in their order."""

from collections.abc import Iterable
from typing import NamedTuple

from workbench.plan.alike import Replica
from workbench.plan.lowered import Direction, Route, Slice, Transfer
from workbench.schedule.action import Action


class RowContent(NamedTuple):
    """What a row carries, from which pass to which; fields as in `Transfer`."""

    edge: str
    direction: Direction
    producer: Action
    consumer: Action
    width: int
    slices: tuple[Slice, ...] = ()
    num_tokens: int = 0
    num_bytes: int = 0


class RowDraft(NamedTuple):
    """A row without its number; `follows`: it broadcasts what the draft before it brought.

    A tuple for speed: a Transfer is made once, when its number is known.
    """

    content: RowContent
    route: Route
    source_rank: int
    destination_ranks: tuple[int, ...]
    follows: bool = False

    @property
    def producer(self) -> Action:
        return self.content.producer

    @property
    def consumer(self) -> Action:
        return self.content.consumer

    def numbered(self, row: int) -> Transfer:
        return Transfer(
            row=row,
            route=self.route,
            source_rank=self.source_rank,
            destination_ranks=self.destination_ranks,
            after=row - 1 if self.follows else None,
            edge=self.content.edge,
            direction=self.content.direction,
            producer=self.content.producer,
            consumer=self.content.consumer,
            width=self.content.width,
            slices=self.content.slices,
            num_tokens=self.content.num_tokens,
            num_bytes=self.content.num_bytes,
        )


class ProducerRows(NamedTuple):
    """All rows of one producer, by consumer; pieces of one boundary stay together."""

    tick: int
    producer: Action
    drafts: tuple[RowDraft, ...]


class Names:
    """What stages, ranks and samples of one replica are called in an equal one."""

    def __init__(self, first: Replica, other: Replica) -> None:
        self._action = first.actions_as(other)
        self._rank = dict(zip(first.ranks, other.ranks, strict=True))
        self._sample = dict(zip(first.samples, other.samples, strict=True))
        self._slices: dict[int, tuple[Slice, ...]] = {}  # by identity: rows of many boundaries share them

    def rows(self, of_first: ProducerRows) -> ProducerRows:
        """The other replica's rows."""
        rank = self._rank
        contents: dict[int, RowContent] = {}
        drafts = []
        for content, route, source, destinations, follows in of_first.drafts:
            renamed = contents.get(id(content))
            if renamed is None:
                renamed = contents[id(content)] = self._content(content)
            to_ranks = tuple([rank[one] for one in destinations])
            drafts.append(RowDraft(renamed, route, rank[source], to_ranks, follows))
        return ProducerRows(of_first.tick, self._action[of_first.producer], tuple(drafts))

    def _content(self, content: RowContent) -> RowContent:
        slices = self._slices.get(id(content.slices))
        if slices is None:
            slices = self._slices[id(content.slices)] = tuple(
                piece._replace(item=piece.item._replace(sample=self._sample[piece.item.sample]))
                for piece in content.slices
            )
        return content._replace(
            producer=self._action[content.producer], consumer=self._action[content.consumer], slices=slices
        )


def in_issue_order(runs: Iterable[ProducerRows]) -> tuple[Transfer, ...]:
    """Number the rows by (tick of the producer, producer, consumer)."""
    ordered = sorted(runs, key=lambda run: (run.tick, issue_key(run.producer)))
    drafts = (draft for run in ordered for draft in run.drafts)
    return tuple(draft.numbered(row) for row, draft in enumerate(drafts))


def issue_key(action: Action) -> tuple[int, str, int]:
    """Order of the passes of one tick."""
    return (action.stage or 0, action.kind, action.microbatch or 0)
