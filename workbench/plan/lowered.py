"""The lowered plan: what machines need, derived once; every machine reads only this."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from workbench.data.sample import Item
from workbench.plan.frame import frame_of
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Plan
from workbench.plan.remembered import Remembered, Same
from workbench.plan.task_graph import TaskGraph, task_graph
from workbench.schedule.action import Action

MOST_NODES = 300_000  # of all task graphs that are remembered
_GRAPHS: Remembered[TaskGraph] = Remembered(MOST_NODES, lambda graph: graph.num_nodes + 1)


class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Route(StrEnum):
    """LOCAL: producer and consumer share the rank, nothing travels. P2P: one sender, one
    receiver. RELAY: to a rank that only hands it on, by the P2P row that comes `after` it. BROADCAST: from a
    leader that received row `after` to the rest of its group."""

    LOCAL = "local"
    P2P = "p2p"
    RELAY = "relay"
    BROADCAST = "broadcast"


class Slice(NamedTuple):
    """Tokens of one item: where they start in the producer's and in the consumer's packed tensor.

    A boundary tensor is packed: [sum of tokens of its items, width], items in the order of the
    microbatch's rows. The tensor of an edge between modules, on the consumer's side, packs the
    items of that edge alone, in the order in which they stand in the consumer's rows.
    For a backward row `source_start` counts in the consumer's gradient tensor: rows are
    exact transposes, so source and destination swap. On a context-parallel rank both count in
    the tensor that the rank holds: its own tokens in ascending order, and on the receiving side of an
    edge between modules its own features; all of them where they stand in no sequence.
    """

    item: Item
    source_start: int
    destination_start: int
    num_tokens: int


class Transfer(NamedTuple):
    """One row of communication. `row` is its place in the global order, and its tag.

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


class Weights(NamedTuple):
    """Weights that always travel together: a layer's own (`shared` None), or one tied weight.

    Where ranks distribute experts, those of a layer are weights apart from its own.
    """

    module: str
    layer: int | None
    shared: str | None = None
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientGroup:
    """Ranks that hold the same weights and sum their gradients; `ranks[0]` counts them in the norm.

    A group of one rank needs no collective. `num_elements` is what one rank holds of it. Only trainable
    weights have groups. No `slots`: `members` is cached on the instance.
    """

    index: int
    ranks: tuple[int, ...]
    weights: tuple[Weights, ...]
    num_elements: int

    @cached_property
    def members(self) -> frozenset[int]:
        """Its ranks, to look one up among thousands."""
        return frozenset(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A plan with everything derived from it.

    No `slots`: the task graph is cached on the instance.

    Args:
        inputs: rows an action waits for. Absent: it waits for nothing.
        outputs: rows that an action's end makes ready (broadcasts follow their `after` row).
        groups: gradient groups, in the order in which every rank issues them.
        reductions: sum of gradients -> groups (indices) it all-reduces, in issue order.
    """

    plan: Plan
    transfers: tuple[Transfer, ...]
    inputs: dict[Action, tuple[int, ...]]
    outputs: dict[Action, tuple[int, ...]]
    groups: tuple[GradientGroup, ...]
    reductions: dict[Action, tuple[int, ...]]

    @cached_property
    def tasks(self) -> TaskGraph:
        """Who waits for whom. ValueError for a rank that would reduce a gradient group twice."""
        return _GRAPHS.answer(
            self.order, lambda: task_graph(self.plan, self.transfers, self.groups, self.reductions)
        )

    @cached_property
    def order(self) -> Hashable:
        """A key of all that decides who waits for whom, and in which order rows travel."""
        groups = tuple((group.index, group.ranks) for group in self.groups)
        return self.order_of_passes, groups, tuple(self.reductions.items())

    @cached_property
    def order_of_passes(self) -> Hashable:
        """The same of all but sums of gradients, for which nothing waits but each other and STEP."""
        rows = Same(self.transfers), Same(self.inputs), Same(self.outputs)
        return frame_of(self.plan), rows, tuple((unit.stages, unit.ranks) for unit in shard_units(self.plan))
