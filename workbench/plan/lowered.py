"""The lowered plan: what executors need, derived once; simulator and runtime read nothing else."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast, overload

import numpy as np

from workbench.arrays import Flags, Ints, ints, spans, starts
from workbench.data.sample import Item
from workbench.headline import Headline
from workbench.plan.frame import frame_of
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Plan
from workbench.plan.task_graph import Reducers, TaskGraph, reducers_of, task_graph
from workbench.schedule.action import Action

MOST_NODES = 300_000  # of all task graphs that are cached
_GRAPHS: LruCache[TaskGraph] = LruCache(MOST_NODES, lambda graph: graph.num_nodes + 1)
Thing = TypeVar("Thing")


class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Route(StrEnum):
    """How a row travels.

    LOCAL: producer and consumer share the rank, nothing travels. P2P: one sender, one receiver. RELAY: to a
    rank that only relays it, by the P2P row whose `after` it is. BROADCAST: from a leader that received row
    `after` to the rest of its group.
    """

    LOCAL = "local"
    P2P = "p2p"
    RELAY = "relay"
    BROADCAST = "broadcast"


class Slice(NamedTuple):
    """Tokens of one item: where they start in the producer's and in the consumer's packed tensor.

    A boundary tensor is packed: [sum of tokens of its items, width], items in the order of the
    microbatch's rows. The tensor of an edge between modules, on the consumer's side, packs the
    items of that edge alone, in the order of the consumer's rows.
    For a backward row `source_start` counts in the consumer's gradient tensor: rows are
    exact transposes, so source and destination swap. On a context-parallel rank both count in
    the tensor that the rank holds: its own tokens in ascending order, and on the receiving side of an
    edge between modules its own features; all of them where they are in no sequence.
    """

    item: Item
    source_start: int
    destination_start: int
    num_tokens: int


class Transfer(NamedTuple):
    """One row of communication. `row` is its position in the global order, and its tag.

    `edge` names the boundary: "vision>llm" between modules, "llm" between stages of one.
    A tuple for speed: there are 10^5 of them, and a frozen dataclass takes five times as long to make.
    """

    row: int
    edge: str
    direction: Direction
    route: Route
    producer: Action
    consumer: Action
    source_rank: int
    destination_ranks: tuple[int, ...]
    slices: tuple[Slice, ...]
    num_tokens: int
    width: int
    num_bytes: int
    after: int | None = None

    @property
    def destination_rank(self) -> int:
        return self.destination_ranks[0]


class Ends(NamedTuple):
    """The sending and receiving ranks of a row."""

    source_rank: int
    destination_ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Sequence[Transfer]):
    """All rows in columns of R entries, as `lower` makes them and code that works on all of them reads them.

    As a sequence, the same rows as objects, made on first use. No `slots`: they are cached.

    Args:
        number: the row's own number.
        edge, route: index into `edges`, and into all routes.
        is_backward: whether a gradient goes back.
        producer, consumer: index into `actions`.
        end: index into `ends`.
        content: index into `contents`.
        named: key of its renaming in `names`.
        num_tokens, width, num_bytes: as in `Transfer`.
        after: row; -1: none.
        edges, actions, ends: that the rows refer to.
        contents: slices, for many rows each.
        names: number -> sample of a content -> its name in a row; empty: unchanged.
    """

    number: Ints
    edge: Ints
    route: Ints
    is_backward: Flags
    producer: Ints
    consumer: Ints
    end: Ints
    content: Ints
    named: Ints
    num_tokens: Ints
    width: Ints
    num_bytes: Ints
    after: Ints
    edges: Sequence[str]
    actions: Sequence[Action]
    ends: Sequence[Ends]
    contents: Sequence[tuple[Slice, ...]]
    names: Mapping[int, Mapping[int, int]] = field(default_factory=lambda: {0: {}})

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> "Rows":
        """Return any transfer rows in columns, unchecked; a `Rows` is returned unchanged. O(rows)."""
        if isinstance(transfers, Rows):
            return transfers
        rows = tuple(transfers)
        edges, actions, ends = _Numbers[str](), _Numbers[Action](), _Numbers[Ends]()
        contents: dict[int, tuple[Slice, ...]] = {id(row.slices): row.slices for row in rows}
        content_index = {name: number for number, name in enumerate(contents)}
        rows_in_columns = cls(
            number=ints(row.row for row in rows),
            edge=ints(edges[row.edge] for row in rows),
            route=ints(ROUTES[row.route] for row in rows),
            is_backward=np.array([row.direction is Direction.BACKWARD for row in rows], dtype=np.bool_),
            producer=ints(actions[row.producer] for row in rows),
            consumer=ints(actions[row.consumer] for row in rows),
            end=ints(ends[Ends(row.source_rank, row.destination_ranks)] for row in rows),
            content=ints(content_index[id(row.slices)] for row in rows),
            named=np.zeros(len(rows), dtype=np.int64),
            num_tokens=ints(row.num_tokens for row in rows),
            width=ints(row.width for row in rows),
            num_bytes=ints(row.num_bytes for row in rows),
            after=ints(-1 if row.after is None else row.after for row in rows),
            edges=tuple(edges),
            actions=tuple(actions),
            ends=tuple(ends),
            contents=tuple(contents.values()),
        )
        vars(rows_in_columns)["_transfers"] = rows
        return rows_in_columns

    def __len__(self) -> int:
        return len(self.number)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, index: int | slice) -> Transfer | tuple[Transfer, ...]:
        return self._transfers[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows | tuple) and self._transfers == tuple(other)

    __hash__ = object.__hash__

    @cached_property
    def source(self) -> Ints:
        """[R] the sending rank."""
        return ints(ends.source_rank for ends in self.ends)[self.end]

    @cached_property
    def num_destinations(self) -> Ints:
        """[R] number of receiving ranks."""
        return self._num_destinations[self.end]

    @cached_property
    def destination(self) -> Ints:
        """[sum of num_destinations] receiving ranks, row by row."""
        flat = ints(chain.from_iterable(ends.destination_ranks for ends in self.ends))
        return flat[spans(starts(self._num_destinations)[self.end], self.num_destinations)]

    @cached_property
    def _num_destinations(self) -> Ints:
        """[ends]"""
        return ints(len(ends.destination_ranks) for ends in self.ends)

    @cached_property
    def by_consumer(self) -> Mapping[Action, tuple[int, ...]]:
        """The rows that each action waits for."""
        return RowsByAction(self.actions, self.consumer)

    @cached_property
    def by_producer(self) -> Mapping[Action, tuple[int, ...]]:
        """The rows that become ready when each action ends."""
        return RowsByAction(self.actions, self.producer)

    def numbers(self, number_of: Mapping[Action, int]) -> Ints:
        """[actions] number of each action in a table; -1: not in it."""
        return ints(number_of.get(action, -1) for action in self.actions)

    @cached_property
    def _transfers(self) -> tuple[Transfer, ...]:
        slices: dict[tuple[int, int], tuple[Slice, ...]] = {}
        names = {name: self.names[name] for name in set(self.named.tolist())}
        for content, name in dict.fromkeys(zip(self.content.tolist(), self.named.tolist(), strict=True)):
            slices[content, name] = _renamed(self.contents[content], names[name])
        directions, routes = tuple(Direction), tuple(Route)
        columns = (
            self.number.tolist(),
            map(self.edges.__getitem__, self.edge.tolist()),
            map(directions.__getitem__, self.is_backward.tolist()),
            map(routes.__getitem__, self.route.tolist()),
            map(self.actions.__getitem__, self.producer.tolist()),
            map(self.actions.__getitem__, self.consumer.tolist()),
            map(self.ends.__getitem__, self.end.tolist()),
            map(slices.__getitem__, zip(self.content.tolist(), self.named.tolist(), strict=True)),
            self.num_tokens.tolist(),
            self.width.tolist(),
            self.num_bytes.tolist(),
            (None if row < 0 else row for row in self.after.tolist()),
        )
        return tuple(
            [
                Transfer(*row[:6], *row[6], *row[7:])
                for row in zip(*cast(tuple[Iterable[Any], ...], columns), strict=True)
            ]
        )


ROUTES = {route: number for number, route in enumerate(Route)}  # as in columns


class RowsByAction(Mapping[Action, tuple[int, ...]]):
    """Numbers of the rows that have an action as one end; the table is built on first use.

    Args:
        actions: by number.
        end: [rows] number of an action.
    """

    def __init__(self, actions: Sequence[Action], end: Ints) -> None:
        self._actions, self.end = actions, end

    @cached_property
    def _table(self) -> dict[Action, tuple[int, ...]]:
        rows_of: dict[int, list[int]] = {}
        for row, action in enumerate(self.end.tolist()):
            rows_of.setdefault(action, []).append(row)
        return {self._actions[action]: tuple(rows) for action, rows in rows_of.items()}

    def __getitem__(self, action: Action) -> tuple[int, ...]:
        return self._table[action]

    def __iter__(self) -> Iterator[Action]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class _Numbers(dict[Thing, int]):
    """Things -> their numbers, in the order of first use."""

    def __missing__(self, thing: Thing) -> int:
        return self.setdefault(thing, len(self))


def _renamed(slices: tuple[Slice, ...], names: Mapping[int, int]) -> tuple[Slice, ...]:
    if not names:
        return slices
    return tuple([piece._replace(item=Item(names[piece.item.sample], piece.item.k)) for piece in slices])


class Weights(NamedTuple):
    """Weights whose gradients are reduced together: a layer's own (`shared` None), or one tied weight.

    Where ranks distribute experts, a layer's experts are grouped apart from its other weights.
    """

    module: str
    layer: int | None
    shared: str | None = None
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientGroup:
    """Ranks that hold the same weights and reduce their gradients; `ranks[0]` counts them in the norm.

    A group of one rank needs no collective. `num_elements` is what one rank holds of it. Only trainable
    weights have groups. No `slots`: `members` is cached on the instance.
    """

    index: int
    ranks: tuple[int, ...]
    weights: tuple[Weights, ...]
    num_elements: int

    @cached_property
    def members(self) -> frozenset[int]:
        """Its ranks as a set, for fast look-ups."""
        return frozenset(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Lowered(Headline):
    """A plan with everything derived from it.

    No `slots`: the task graph is cached on the instance.

    Args:
        inputs: rows an action waits for. Absent: it waits for nothing.
        outputs: rows that become ready when an action ends (broadcasts follow their `after` row).
        groups: gradient groups, in the order in which every rank issues them.
        reductions: gradient reduction -> indices of the groups it all-reduces, in issue order.
    """

    plan: Plan
    transfers: Sequence[Transfer]
    inputs: Mapping[Action, tuple[int, ...]]
    outputs: Mapping[Action, tuple[int, ...]]
    groups: tuple[GradientGroup, ...]
    reductions: dict[Action, tuple[int, ...]]

    @property
    def headline(self) -> str:
        """See `Headline`."""
        size = f"{len(self.transfers):,} transfers, {len(self.groups):,} gradient groups"
        return f"<Lowered, {size}: {self.plan.headline}>"

    @cached_property
    def rows(self) -> Rows:
        """The transfers in columns."""
        return Rows.of(self.transfers)

    @cached_property
    def tasks(self) -> TaskGraph:
        """Who waits for whom. Raises ValueError for a rank that would reduce a gradient group twice."""
        return _GRAPHS.get_or(
            self.order, lambda: task_graph(self.plan, self.rows, self.groups, self.reducers)
        )

    @cached_property
    def reducers(self) -> dict[Action, tuple[Reducers, ...]]:
        """Gradient reduction -> the ranks of its stage that have groups in it, by these groups."""
        return reducers_of(self.plan.ranks_of, self.groups, self.reductions)

    @cached_property
    def order(self) -> Hashable:
        """Key of everything that decides who waits for whom, and in which order rows travel."""
        groups = tuple((group.index, group.ranks) for group in self.groups)
        return self.order_of_passes, groups, tuple(self.reductions.items())

    @cached_property
    def order_of_passes(self) -> Hashable:
        """The same without gradient reductions, which only each other and STEP wait for."""
        rows = Identity(self.transfers), Identity(self.inputs), Identity(self.outputs)
        return frame_of(self.plan), rows, tuple((unit.stages, unit.ranks) for unit in shard_units(self.plan))
