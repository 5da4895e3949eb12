"""Rows before they have numbers: copied from a replica to its equals, then put in their order."""

from collections.abc import Iterable
from typing import NamedTuple

from workbench.data.sample import Item
from workbench.plan.alike import Component
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


class Path(NamedTuple):
    """Where a row goes; `follows`: it broadcasts what the row before it brought."""

    route: Route
    source_rank: int
    destination_ranks: tuple[int, ...]
    follows: bool = False


class RowDraft(NamedTuple):
    """Rows without numbers, one after another: the same content on several paths."""

    content: RowContent
    paths: tuple[Path, ...]

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

    def renamed(self) -> Iterable[RowDraft]:
        """The drafts by their own names."""
        return self.drafts if self.names is None else map(self.names.draft, self.drafts)


class Names:
    """What stages, ranks and samples of one replica are called in an equal one."""

    def __init__(self, first: Component, other: Component) -> None:
        self._rank = dict(zip(first.ranks, other.ranks, strict=True))
        self._action = first.actions_as(other)
        self._sample = dict(zip(first.samples, other.samples, strict=True))
        # by identity: rows of many boundaries share them
        self._slices: dict[int, tuple[Slice, ...]] = {}
        self._paths: dict[int, tuple[Path, ...]] = {}

    def rows(self, of_first: ProducerRows) -> ProducerRows:
        """The other replica's rows."""
        return of_first._replace(producer=self._action[of_first.producer], names=self)

    def draft(self, of_first: RowDraft) -> RowDraft:
        """The other replica's draft."""
        (edge, direction, producer, consumer, width, slices, num_tokens, num_bytes), paths = of_first
        content = RowContent(
            edge,
            direction,
            self._action[producer],
            self._action[consumer],
            width,
            self._renamed_slices(slices),
            num_tokens,
            num_bytes,
        )
        return RowDraft(content, self._renamed_paths(paths))

    def _renamed_slices(self, slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
        if id(slices) not in self._slices:
            sample = self._sample
            self._slices[id(slices)] = tuple(
                Slice(Item(sample[item.sample], item.k), source, destination, num_tokens)
                for item, source, destination, num_tokens in slices
            )
        return self._slices[id(slices)]

    def _renamed_paths(self, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        if id(paths) not in self._paths:
            rank = self._rank
            self._paths[id(paths)] = tuple(
                Path(route, rank[source], tuple(rank[one] for one in destinations), follows)
                for route, source, destinations, follows in paths
            )
        return self._paths[id(paths)]


class Numbered(NamedTuple):
    """Rows in their order, and which of them an action waits for and makes ready; see `Lowered`."""

    transfers: tuple[Transfer, ...]
    inputs: dict[Action, tuple[int, ...]]
    outputs: dict[Action, tuple[int, ...]]


def in_issue_order(runs: Iterable[ProducerRows]) -> Numbered:
    """Number the rows by (tick of the producer, producer, consumer)."""
    transfers: list[Transfer] = []
    inputs: dict[Action, list[int]] = {}
    outputs: dict[Action, tuple[int, ...]] = {}
    row, last = 0, None
    waiting: list[int] = []
    for run in sorted(runs, key=lambda run: (run.tick, issue_key(run.producer))):
        first = row
        for content, paths in run.renamed():
            edge, direction, producer, consumer, width, slices, num_tokens, num_bytes = content
            if consumer is not last:
                last, waiting = consumer, inputs.setdefault(consumer, [])
            for route, source, destinations, follows in paths:
                after = row - 1 if follows else None
                ends = producer, consumer, source, destinations
                size = slices, num_tokens, width, num_bytes
                transfers.append(_new(Transfer, (row, edge, direction, route, *ends, *size, after)))
                waiting.append(row)
                row += 1
        outputs[run.producer] = tuple(range(first, row))
    return Numbered(tuple(transfers), {action: tuple(rows) for action, rows in inputs.items()}, outputs)


_new = tuple.__new__  # without the keywords of a named tuple, of which there are 10^5


def issue_key(action: Action) -> tuple[int, str, int]:
    """Order of the passes of one tick."""
    return (action.stage or 0, action.kind, action.microbatch or 0)
