"""Rows before they have numbers: copied from a replica to its equals, then put in their order."""

from collections.abc import Iterable
from typing import NamedTuple

from workbench.data.sample import Item
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


class ProducerRows(NamedTuple):
    """All rows of one producer, by consumer; pieces of one boundary stay together.

    They are the drafts as they stand, or where `names` are given those of an equal replica.
    """

    tick: int
    producer: Action
    drafts: tuple[RowDraft, ...]
    names: "Names | None" = None

    def numbered(self, first_row: int) -> list[Transfer]:
        """From that number on."""
        drafts = enumerate(self.drafts, first_row)
        if self.names is None:
            return [
                _transfer(row, draft, draft.content, draft.source_rank, draft.destination_ranks)
                for row, draft in drafts
            ]
        rank, content_of = self.names.rank, self.names.contents(self.drafts)
        return [
            _transfer(
                row,
                draft,
                content_of[id(draft.content)],
                rank[draft.source_rank],
                tuple([rank[one] for one in draft.destination_ranks]),
            )
            for row, draft in drafts
        ]


class Names:
    """What stages, ranks and samples of one replica are called in an equal one."""

    def __init__(self, first: Replica, other: Replica) -> None:
        self.rank = dict(zip(first.ranks, other.ranks, strict=True))
        self._action = first.actions_as(other)
        self._sample = dict(zip(first.samples, other.samples, strict=True))
        self._slices: dict[int, tuple[Slice, ...]] = {}  # by identity: rows of many boundaries share them

    def rows(self, of_first: ProducerRows) -> ProducerRows:
        """The other replica's rows."""
        return of_first._replace(producer=self._action[of_first.producer], names=self)

    def contents(self, drafts: Iterable[RowDraft]) -> dict[int, RowContent]:
        """By identity of what the drafts carry: ranks that carry the same share it."""
        return {key: self._content(each) for key, each in {id(d.content): d.content for d in drafts}.items()}

    def _content(self, content: RowContent) -> RowContent:
        slices = self._slices.get(id(content.slices))
        if slices is None:
            sample = self._sample
            slices = self._slices[id(content.slices)] = tuple(
                Slice(Item(sample[item.sample], item.k), source, destination, num_tokens)
                for item, source, destination, num_tokens in content.slices
            )
        return content._replace(
            producer=self._action[content.producer], consumer=self._action[content.consumer], slices=slices
        )


def in_issue_order(runs: Iterable[ProducerRows]) -> tuple[Transfer, ...]:
    """Number the rows by (tick of the producer, producer, consumer)."""
    found: list[Transfer] = []
    for run in sorted(runs, key=lambda run: (run.tick, issue_key(run.producer))):
        found += run.numbered(len(found))
    return tuple(found)


def issue_key(action: Action) -> tuple[int, str, int]:
    """Order of the passes of one tick."""
    return (action.stage or 0, action.kind, action.microbatch or 0)


def _transfer(
    row: int, draft: RowDraft, content: RowContent, source_rank: int, destination_ranks: tuple[int, ...]
) -> Transfer:
    return Transfer(
        row=row,
        edge=content.edge,
        direction=content.direction,
        route=draft.route,
        producer=content.producer,
        consumer=content.consumer,
        source_rank=source_rank,
        destination_ranks=destination_ranks,
        slices=content.slices,
        num_tokens=content.num_tokens,
        width=content.width,
        num_bytes=content.num_bytes,
        after=row - 1 if draft.follows else None,
    )
