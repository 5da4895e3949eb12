"""Lowering: from a plan to its transfer rows, their order and its gradient groups."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from workbench.arrays import Flags, Ints
from workbench.collector import collector_paused
from workbench.data.sample import Item
from workbench.model.layer import TokenCount
from workbench.model.model_graph import Edge
from workbench.plan.alike import alike_replicas, firsts_of
from workbench.plan.crossing import Part, exchanged, inside, offsets, returned, sent, shape_of
from workbench.plan.frame import frame_of
from workbench.plan.gradient_groups import gradient_groups, reductions
from workbench.plan.lowered import Lowered, Rows, Slice
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.order import issue_ticks
from workbench.plan.paths import cut, part_paths
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Holding, Routing, routing_of
from workbench.plan.row_drafts import Drafts, Link, in_issue_order
from workbench.plan.stage import Stage
from workbench.plan.token_owners import Run, feature_runs, goes_to_owners, held_runs
from workbench.schedule.action import Action, Pass, passes_of

MOST_ROWS = 1_000_000  # in all cached plans together: 100 MB
_ROWS: LruCache[Rows] = LruCache(MOST_ROWS, lambda rows: len(rows) + 1)
_DRAFTS: LruCache[Drafts] = LruCache(  # a plan and its parts share them
    MOST_ROWS, lambda drafts: len(drafts.link) + 1
)
_PARTS: LruCache[tuple[Part, ...]] = LruCache(
    MOST_ROWS, lambda parts: sum(len(part.slices) for part in parts) + 1
)


@collector_paused()
def lower(plan: Plan) -> Lowered:
    """Derive transfer rows, their order and the gradient groups.

    Rows are numbered by the tick in which their producer ends when every action takes one tick, then by
    producer and edge, so that any two ranks agree on the order of their rows. An action that can never run
    counts as last; `check_deadlock` reports it.

    Raises:
        ValueError: an item that no microbatch holds, or a layout that is refused
            (tensor- or context-parallel degree that changes inside a replica).

    Complexity: O(actions + rows + items) apart from sorting.
    """
    rows = _ROWS.get_or(frame_of(plan), lambda: _rows(plan))
    groups = gradient_groups(plan)
    return Lowered(
        plan=plan,
        transfers=rows,
        inputs=rows.by_consumer,
        outputs=rows.by_producer,
        groups=groups,
        reductions=reductions(plan, groups),
    )


def _rows(plan: Plan) -> Rows:
    """Draft the rows of the first of equal replicas, and rename them for the others."""
    alike = alike_replicas(plan)
    part = firsts_of(plan, alike) if alike else plan
    drafts = _DRAFTS.get_or(frame_of(part), lambda: _Drafting(part).drafts())
    return in_issue_order(drafts, alike)


class _Passes:
    """Numbers of passes, by stage and microbatch: the plan's, then those that are in no program."""

    def __init__(self, routing: Routing) -> None:
        self._routing, self._plan = routing, routing.plan
        self._number = dict(routing.plan.program_actions)
        self._forward: dict[int, Ints] = {}
        self._backward: dict[int, Ints] = {}

    @property
    def actions(self) -> tuple[Action, ...]:
        """All passes, by number."""
        return tuple(self._number)

    def microbatches(self, stage: Stage) -> tuple[Microbatch, ...]:
        """Return the microbatches of the stage's replica."""
        return self._plan.microbatches_of.get((stage.module, stage.replica), ())

    def forward(self, stage: Stage) -> Ints:
        """[microbatches] numbers of the forwards."""
        if stage.id not in self._forward:
            indices = [microbatch.index for microbatch in self.microbatches(stage)]
            self._forward[stage.id] = self._numbers(passes_of(stage.id, Pass.F, indices))
        return self._forward[stage.id]

    def backward(self, stage: Stage) -> Ints:
        """[microbatches] numbers of the passes that compute the input's gradient: I if split, else B."""
        if stage.id not in self._backward:
            indices = [microbatch.index for microbatch in self.microbatches(stage)]
            both = zip(*(passes_of(stage.id, kind, indices) for kind in (Pass.I, Pass.B)), strict=True)
            self._backward[stage.id] = self._numbers(
                [split if split in self._number else whole for split, whole in both]
            )
        return self._backward[stage.id]

    def _numbers(self, actions: Sequence[Action]) -> Ints:
        number_of = self._number
        return np.array([number_of.setdefault(action, len(number_of)) for action in actions], dtype=np.int64)

    def computes(self, stage: Stage) -> Flags:
        """[microbatches] whether the stage has a backward."""
        return np.array(self._routing.backwards(stage), dtype=np.bool_)

    def carries(self, stage: Stage, layer: int) -> Flags:
        """[microbatches] whether the output of that layer needs a gradient."""
        present, flow_of = self._routing.present_in((stage.module, stage.replica)), self._routing.flow_of
        is_carried = {modules: flow_of(modules).carries[stage.module][layer] for modules in set(present)}
        return np.array([is_carried[modules] for modules in present], dtype=np.bool_)


class _Sent(NamedTuple):
    """What a stage sends between stages of its replica, in columns of one entry per message.

    Args:
        share: its index.
        microbatch: its index.
        content: number of the slices.
        named: number of the renaming of samples.
        num_tokens: of the slices.
    """

    share: Ints
    microbatch: Ints
    content: Ints
    named: Ints
    num_tokens: Ints


class _Crossing(NamedTuple):
    """What crosses for one microbatch, and, with renamed samples, for all equal ones.

    Args:
        number: of the crossing.
        samples: of that microbatch.
        parts: that cross.
    """

    number: int
    samples: tuple[int, ...]
    parts: tuple[Part, ...]


_Hop = tuple[str, bool, Stage, Stage]  # edge, whether backward, from stage, to stage


class _Drafting:
    """Drafts all rows of a plan, still without row numbers: what crosses between stages, on which paths."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._routing = plan, routing_of(plan)
        self._passes = _Passes(self._routing)
        self._links: list[Link] = []
        self._links_of: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._boundary_links_of: dict[tuple[object, ...], Ints] = {}
        self._contents: list[tuple[Slice, ...]] = []
        self._crossings: dict[tuple[object, ...], _Crossing] = {}
        self._rows_of: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
        self._cut: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._names: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {((), ()): 0}
        self._drafts: list[tuple[int, int, int, int, int, int]] = []  # one at a time
        self._columns: list[tuple[Ints, ...]] = []  # many at a time
        self._held: dict[tuple[int, TokenCount], tuple[tuple[Run, ...], ...]] = {}

    def drafts(self) -> Drafts:
        """Draft the rows of all boundaries."""
        for chain in self._plan.chain.values():
            self._add_boundaries(chain)
        for edge in self._plan.model.edges:
            for replica in self._plan.replicas(edge.target):
                for reader in self._routing.reading_stages(edge, replica):
                    self._add_edge(edge, reader)
        self._columns.append(tuple(np.array(self._drafts, dtype=np.int64).reshape(-1, 6).T))
        link, producer, consumer, content, named, num_tokens = map(
            np.concatenate, zip(*self._columns, strict=True)
        )
        return Drafts(
            links=tuple(self._links),
            actions=self._passes.actions,
            contents=tuple(self._contents),
            names=tuple(dict(zip(*samples, strict=True)) for samples in self._names),
            ticks=issue_ticks(self._plan, *self._in_programs(producer, consumer)),
            link=link,
            producer=producer,
            consumer=consumer,
            content=content,
            named=named,
            num_tokens=num_tokens,
        )

    def _in_programs(self, *columns: Ints) -> tuple[Ints, ...]:
        return tuple(np.where(of_rows < len(self._plan.program_actions), of_rows, -1) for of_rows in columns)

    def _add_boundaries(self, chain: Sequence[Stage]) -> None:
        """Draft rows between stages of one replica; a microbatch sends the same tokens at each boundary."""
        passes, layers = self._passes, self._plan.model.module(chain[0].module).layers
        hops_by_count: dict[TokenCount, list[tuple[Ints, Ints, Ints, Flags]]] = {}
        for producer, consumer in pairwise(chain):
            after_layer, module = producer.layers[1] - 1, producer.module
            layer = layers[after_layer]
            hops = hops_by_count.setdefault(layer.emits, [])
            link = self._boundary_links((module, False, producer, consumer), layer.out_width)
            forwards = passes.forward(producer), passes.forward(consumer)
            hops.append((link, *forwards, np.ones(len(forwards[0]), np.bool_)))
            is_back = passes.computes(consumer) & passes.carries(producer, after_layer)
            if is_back.any():
                link = self._boundary_links((module, True, consumer, producer), layer.out_width)
                hops.append((link, passes.backward(consumer), passes.backward(producer), is_back))
        for count, hops in hops_by_count.items():
            sent = self._sent_by(chain[0], count)
            links, producers, consumers, are_sent = map(np.array, zip(*hops, strict=True))
            hop, message = np.nonzero(are_sent[:, sent.microbatch])
            microbatch = sent.microbatch[message]
            self._columns.append(
                (
                    links[hop, sent.share[message]],
                    producers[hop, microbatch],
                    consumers[hop, microbatch],
                    sent.content[message],
                    sent.named[message],
                    sent.num_tokens[message],
                )
            )

    def _boundary_links(self, hop: _Hop, width: int) -> Ints:
        """[share] link to the same share of the other stage; tokens are in one part.

        Stages on the same ranks have the same paths, and so the same links.
        """
        edge, is_backward, sender, receiver = hop
        key = edge, is_backward, sender.ranks, receiver.ranks, width
        if key not in self._boundary_links_of:
            links = [self._link_numbers(hop, (share, share), width) for share in range(sender.num_shares)]
            self._boundary_links_of[key] = np.array(links, dtype=np.int64)[:, 0]
        return self._boundary_links_of[key]

    def _sent_by(self, stage: Stage, count: TokenCount) -> _Sent:
        """Return what the stage's ranks have of every microbatch."""
        messages = [
            (part.source, index, content, named, num_tokens)
            for index, microbatch in enumerate(self._passes.microbatches(stage))
            for crossing, named in [self._inner_crossing(microbatch, count)]
            for part in crossing.parts
            for content, num_tokens in self._contents_of(part, 1)
        ]
        return _Sent(*np.array(messages, dtype=np.int64).reshape(-1, 5).T)

    def _inner_crossing(self, microbatch: Microbatch, count: TokenCount) -> tuple[_Crossing, int]:
        """Return what crosses from stage to stage of a replica, and the number of its renaming."""
        shape, samples = shape_of(self._plan, (microbatch,), ())
        return self._crossing(
            (microbatch.module, count, shape), samples, lambda: inside(self._held_runs(microbatch, count))
        )

    def _add_edge(self, edge: Edge, consumer: Stage) -> None:
        """Draft an edge's rows into one reading stage; the producer sums the gradients of all readers."""
        is_back = self._passes.computes(consumer)
        for index, target in enumerate(self._passes.microbatches(consumer)):
            for holding, starts in _sources(self._routing, edge, consumer, target).items():
                self._add_from(edge, holding, starts, (consumer, index, bool(is_back[index])))

    def _add_from(
        self, edge: Edge, holding: Holding, starts: Mapping[Item, int], reader: tuple[Stage, int, bool]
    ) -> None:
        """Draft the rows between one microbatch of the producer and one of the consumer.

        Args:
            edge: between them.
            holding: of the producer.
            starts: of its items, in the consumer's tensor.
            reader: the consuming stage, the index of its microbatch, and whether that has a backward.
        """
        routing, passes, (consumer, index, is_back) = self._routing, self._passes, reader
        source = self._plan.microbatches_of[edge.source, holding.replica][holding.microbatch]
        target = passes.microbatches(consumer)[index]
        producer = routing.boundary_stage(edge.source, holding.replica, edge.after_layer)
        layer = self._plan.model.module(edge.source).layers[edge.after_layer]
        shape, samples = shape_of(self._plan, (source, target), starts)

        def forward() -> tuple[Part, ...]:
            runs = self._held_runs(source, layer.emits)
            if goes_to_owners(routing, edge, target):
                return exchanged(runs, feature_runs(routing, edge, target), starts)
            return sent(runs, starts)

        def backward() -> tuple[Part, ...]:
            features = feature_runs(routing, edge, target)
            if producer.num_shares > 1:
                return exchanged(features, self._held_runs(source, layer.emits), starts)
            return returned(features, offsets(routing, source, layer.emits), starts)

        ends = int(passes.forward(producer)[holding.microbatch]), int(passes.forward(consumer)[index])
        crossing = self._crossing((edge.name, False, shape), samples, forward)
        self._add((edge.name, False, producer, consumer), ends, layer.out_width, crossing)
        if is_back and routing.flow(source).carries[edge.source][edge.after_layer]:
            ends = int(passes.backward(consumer)[index]), int(passes.backward(producer)[holding.microbatch])
            crossing = self._crossing((edge.name, True, shape), samples, backward)
            self._add((edge.name, True, consumer, producer), ends, layer.out_width, crossing)

    def _held_runs(self, microbatch: Microbatch, count: TokenCount) -> tuple[tuple[Run, ...], ...]:
        key = id(microbatch), count  # the plan keeps the microbatch alive
        if key not in self._held:
            self._held[key] = held_runs(self._routing, microbatch, count)
        return self._held[key]

    def _crossing(
        self, key: tuple[object, ...], samples: tuple[int, ...], derive: Callable[[], tuple[Part, ...]]
    ) -> tuple[_Crossing, int]:
        """Return the crossing of this key, derived once, and the number of the renaming of its samples."""
        if key not in self._crossings:
            of_all_plans = Identity(self._plan.model), Identity(self._plan.batch), key, samples
            parts = _PARTS.get_or(of_all_plans, derive)
            self._crossings[key] = _Crossing(len(self._crossings), samples, parts)
        crossing = self._crossings[key]
        if samples == crossing.samples:
            return crossing, 0
        return crossing, self._names.setdefault((crossing.samples, samples), len(self._names))

    def _add(self, hop: _Hop, ends: tuple[int, int], width: int, crossing: tuple[_Crossing, int]) -> None:
        """Draft rows between two passes, from every share with tokens of the crossing."""
        edge, is_backward, producer, consumer = hop
        shape, named = crossing
        key = edge, is_backward, producer.id, consumer.id, shape.number
        if key not in self._rows_of:
            self._rows_of[key] = [
                (link, content, num_tokens)
                for part in shape.parts
                for links in [self._link_numbers(hop, (part.source, part.destination), width)]
                for link, (content, num_tokens) in zip(
                    links, self._contents_of(part, len(links)), strict=True
                )
                if num_tokens
            ]
        self._drafts += [
            (link, *ends, content, named, num_tokens) for link, content, num_tokens in self._rows_of[key]
        ]

    def _contents_of(self, part: Part, num_parts: int) -> list[tuple[int, int]]:
        """Cut a part's tokens evenly; return the content number and the tokens of each piece."""
        key = id(part), num_parts  # the crossing keeps the part alive
        if key not in self._cut:
            self._cut[key] = []
            for slices, num_tokens in cut(part.slices, part.num_tokens, num_parts):
                self._cut[key].append((len(self._contents), num_tokens))
                self._contents += [slices] if num_tokens else []  # empty if there are fewer tokens than parts
        return self._cut[key]

    def _link_numbers(self, hop: _Hop, indices: tuple[int, int | None], width: int) -> tuple[int, ...]:
        """Return the links between two shares, one for each part of the tokens."""
        edge, is_backward, producer, consumer = hop
        key = edge, is_backward, producer.id, consumer.id, indices
        if key not in self._links_of:
            paths_by_part = part_paths(self._plan, producer.id, consumer.id, *indices)
            first, num_bytes = len(self._links), width * self._plan.settings.precision.num_bytes
            self._links += [Link(edge, is_backward, width, num_bytes, paths) for paths in paths_by_part]
            self._links_of[key] = tuple(range(first, len(self._links)))
        return self._links_of[key]


def _sources(
    routing: Routing, edge: Edge, consumer: Stage, target: Microbatch
) -> dict[Holding, dict[Item, int]]:
    """Return where an edge's items come from, and where each starts in the consumer's tensor of the edge."""
    source = routing.plan.model.module(edge.source)
    count = source.layers[edge.after_layer].emits
    starts: dict[Holding, dict[Item, int]] = {}
    start = 0
    for item in routing.wanted(edge, target):
        starts.setdefault(routing.holding(edge, item, consumer), {})[item] = start
        start += routing.tokens(source, item, count)
    return starts
