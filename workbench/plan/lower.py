"""From a plan to what machines need: transfer rows and their order."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from workbench.collector import collector_paused
from workbench.data.sample import Item
from workbench.model.layer import TokenCount
from workbench.model.model_graph import Edge
from workbench.plan.alike import alike_replicas, firsts_of
from workbench.plan.frame import frame_of
from workbench.plan.gradient_groups import gradient_groups, reductions
from workbench.plan.lowered import Direction, Lowered, Slice
from workbench.plan.order import issue_ticks
from workbench.plan.paths import cut, ways
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.plan.remembered import Remembered
from workbench.plan.routing import Holding, Routing, routing_of
from workbench.plan.row_drafts import (
    Names,
    Numbered,
    ProducerRows,
    RowContent,
    RowDraft,
    in_issue_order,
    issue_key,
)
from workbench.plan.token_owners import Run, feature_runs, goes_to_owners, held_runs
from workbench.schedule.action import Action, Pass

MOST_ROWS = 200_000  # of all plans that are remembered
_ROWS: Remembered[Numbered] = Remembered(MOST_ROWS, lambda rows: len(rows.transfers) + 1)
_ORIGINAL: Remembered[list[ProducerRows]] = Remembered(  # a plan and parts of it have the same
    MOST_ROWS, lambda runs: sum(len(run.drafts) for run in runs) + 1
)


@collector_paused()
def lower(plan: Plan) -> Lowered:
    """Derive transfer rows, their order and the gradient groups.

    Rows are numbered by the tick in which their producer ends when every action takes one
    tick, then by producer and edge, so that any two ranks agree on the order of their rows.
    An action that can never run counts as last; `check_deadlock` reports it.

    Raises:
        ValueError: an item that no microbatch holds, or a layout that is refused
            (tensor- or context-parallel degree that changes inside a replica).

    Complexity: O(actions + rows + items) apart from sorting.
    """
    rows = _ROWS.answer(frame_of(plan), lambda: in_issue_order(_runs(plan)))
    groups = gradient_groups(plan)
    return Lowered(
        plan=plan,
        transfers=rows.transfers,
        inputs=rows.inputs,
        outputs=rows.outputs,
        groups=groups,
        reductions=reductions(plan, groups),
    )


class _Part(NamedTuple):
    """Tokens that one context-parallel place of a stage sends to one of another; None: to all its ranks."""

    slices: tuple[Slice, ...]
    source: int
    destination: int | None


@dataclass(frozen=True, slots=True)
class _Boundary:
    """A tensor that crosses from one stage to another for one pair of microbatches.

    `forward` are its tokens from the producer's places, `backward` those of its gradient from the
    consumer's; None where none makes the way back.
    """

    edge: str
    producer: Stage
    consumer: Stage
    source: Microbatch
    target: Microbatch
    after_layer: int
    forward: tuple[_Part, ...]
    backward: tuple[_Part, ...] | None


def _boundaries(routing: Routing) -> Iterator[_Boundary]:
    plan = routing.plan
    for (module, replica), chain in plan.chain.items():
        for microbatch in plan.microbatches_of.get((module, replica), ()):
            carries = routing.flow(microbatch).carries[module]
            layers = plan.model.module(module).layers
            held: dict[TokenCount, tuple[_Part, ...]] = {}  # the same between all stages
            for producer, consumer in pairwise(chain):
                after_layer = producer.layers[1] - 1
                count = layers[after_layer].emits
                if count not in held:
                    held[count] = _inside(routing, microbatch, count)
                parts = held[count]
                gradient = carries[after_layer] and routing.has_backward(consumer, microbatch)
                yield _Boundary(
                    module,
                    producer,
                    consumer,
                    microbatch,
                    microbatch,
                    after_layer,
                    parts,
                    parts if gradient else None,
                )
    for edge in plan.model.edges:
        yield from _edge_boundaries(routing, edge)


def _edge_boundaries(routing: Routing, edge: Edge) -> Iterator[_Boundary]:
    """One for every stage that reads the edge: gradients of all of them are summed at the producer."""
    plan = routing.plan
    for replica in plan.replicas(edge.target):
        for consumer in routing.reading_stages(edge, replica):
            for target in plan.microbatches_of.get((edge.target, replica), ()):
                yield from _into_microbatch(routing, edge, consumer, target)


def _into_microbatch(
    routing: Routing, edge: Edge, consumer: Stage, target: Microbatch
) -> Iterator[_Boundary]:
    plan = routing.plan
    count = plan.model.module(edge.source).layers[edge.after_layer].emits
    features, is_own = feature_runs(routing, edge, target), goes_to_owners(routing, edge, target)
    for holding, starts in _sources(routing, edge, consumer, target).items():
        source = plan.microbatches_of[edge.source, holding.replica][holding.microbatch]
        producer = routing.boundary_stage(edge.source, holding.replica, edge.after_layer)
        carries = routing.flow(source).carries[edge.source][edge.after_layer]
        gradient = carries and routing.has_backward(consumer, target)
        made = held_runs(routing, source, count)
        if is_own:
            forward = _exchanged(made, features, starts)
        else:
            forward = tuple(_Part(_sent(runs, starts), place, None) for place, runs in enumerate(made))
        backward = None
        if gradient and producer.cp > 1:
            backward = _exchanged(features, made, starts)
        elif gradient:
            returned = _returned(features, _offsets(routing, source, count), starts)
            backward = tuple(_Part(slices, place, None) for place, slices in enumerate(returned))
        yield _Boundary(edge.name, producer, consumer, source, target, edge.after_layer, forward, backward)


def _exchanged(
    sources: Sequence[Sequence[Run]], destinations: Sequence[Sequence[Run]], wanted: Container[Item]
) -> tuple[_Part, ...]:
    """What each place of one side holds and each place of the other has in its tensor, of the wanted items.

    Complexity: O(runs x places).
    """
    held: list[dict[Item, list[Run]]] = []
    for runs in destinations:
        held.append({})
        for run in runs:
            if run.item in wanted:
                held[-1].setdefault(run.item, []).append(run)
    return tuple(
        _Part(
            tuple(common for run in runs for common in _common(run, of_item.get(run.item, ()))), here, there
        )
        for here, runs in enumerate(sources)
        for there, of_item in enumerate(held)
    )


def _common(run: Run, others: Iterable[Run]) -> Iterator[Slice]:
    """The tokens of a run that stand in runs of another tensor, with their places in both."""
    for other in others:
        first = max(run.first, other.first)
        num_tokens = min(run.first + run.num_tokens, other.first + other.num_tokens) - first
        if num_tokens > 0:
            starts = run.start + first - run.first, other.start + first - other.first
            yield Slice(run.item, *starts, num_tokens)


def _inside(routing: Routing, microbatch: Microbatch, count: TokenCount) -> tuple[_Part, ...]:
    """What a rank holds of every item: at the same place on both sides."""
    parts = []
    for place, runs in enumerate(held_runs(routing, microbatch, count)):
        held: dict[Item, Slice] = {}
        for run in runs:
            so_far = held.get(run.item, Slice(run.item, run.start, run.start, 0))
            held[run.item] = so_far._replace(num_tokens=so_far.num_tokens + run.num_tokens)
        parts.append(_Part(tuple(held.values()), place, place))
    return tuple(parts)


def _sent(runs: Sequence[Run], starts: Mapping[Item, int]) -> tuple[Slice, ...]:
    """What one producing rank holds of an edge's items, in the order in which the consumer needs them."""
    held: dict[Item, list[Run]] = {}
    for run in runs:
        held.setdefault(run.item, []).append(run)
    return tuple(
        Slice(item, run.start, start + run.first, run.num_tokens)
        for item, start in starts.items()
        for run in held.get(item, ())
    )


def _returned(
    features: Sequence[Sequence[Run]], offsets: Mapping[Item, int], starts: Mapping[Item, int]
) -> tuple[tuple[Slice, ...], ...]:
    """By context-parallel place of the consumer, the gradients of one producer's items."""
    return tuple(
        tuple(
            Slice(run.item, run.start, offsets[run.item] + run.first, run.num_tokens)
            for run in runs
            if run.item in starts
        )
        for runs in features
    )


def _offsets(routing: Routing, microbatch: Microbatch, count: TokenCount) -> dict[Item, int]:
    """Where every item starts in the whole packed tensor."""
    module = routing.plan.model.module(microbatch.module)
    tokens = [routing.tokens(module, item, count) for item in microbatch.items]
    return dict(zip(microbatch.items, accumulate(tokens, initial=0), strict=False))


def _sources(
    routing: Routing, edge: Edge, consumer: Stage, target: Microbatch
) -> dict[Holding, dict[Item, int]]:
    """Where the items of an edge come from, and where each starts in the consumer's tensor of it."""
    source = routing.plan.model.module(edge.source)
    count = source.layers[edge.after_layer].emits
    found: dict[Holding, dict[Item, int]] = {}
    start = 0
    for item in routing.wanted(edge, target):
        found.setdefault(routing.holding(edge, item, consumer), {})[item] = start
        start += routing.tokens(source, item, count)
    return found


def _drafts(plan: Plan, boundary: _Boundary) -> Iterator[RowDraft]:
    """The rows of one boundary, forward and, where a gradient flows, back."""
    producer, consumer = boundary.producer, boundary.consumer
    source, target = boundary.source.index, boundary.target.index
    width = plan.model.module(producer.module).layers[boundary.after_layer].out_width
    there = Action(producer.id, Pass.F, source), Action(consumer.id, Pass.F, target)
    yield from _one_way(plan, boundary.edge, Direction.FORWARD, there, width, boundary.forward)
    if boundary.backward is not None:
        back = _backward_action(plan, consumer, target), _backward_action(plan, producer, source)
        yield from _one_way(plan, boundary.edge, Direction.BACKWARD, back, width, boundary.backward)


def _one_way(
    plan: Plan,
    edge: str,
    direction: Direction,
    ends: tuple[Action, Action],
    width: int,
    parts: Sequence[_Part],
) -> Iterator[RowDraft]:
    """From every context-parallel place that has tokens of it."""
    producer, consumer = ends
    token_bytes = width * plan.settings.precision.num_bytes
    for slices, source, destination in parts:
        found = ways(plan, producer.stage, consumer.stage, source, destination) if slices else ()
        for paths, pieces in zip(found, cut(slices, len(found)), strict=True):
            num_tokens = sum(piece.num_tokens for piece in pieces)
            num_bytes = num_tokens * token_bytes
            content = RowContent(edge, direction, producer, consumer, width, pieces, num_tokens, num_bytes)
            if num_tokens:
                yield RowDraft(content, paths)


def _backward_action(plan: Plan, stage: Stage, microbatch: int) -> Action:
    """The action that computes the input gradient: `I` where the plan splits the backward, else `B`."""
    split = Action(stage.id, Pass.I, microbatch)
    return split if split in plan.program_actions else Action(stage.id, Pass.B, microbatch)


def _runs(plan: Plan) -> list[ProducerRows]:
    """Rows of the first of equal replicas, and the same rows under the names of each of the others."""
    alike = alike_replicas(plan)
    part = firsts_of(plan, alike) if alike else plan
    runs = _ORIGINAL.answer(frame_of(part), lambda: _original_runs(part))
    copied = []
    for first, *others in alike:
        stages = set(first.stages)
        of_first = [run for run in runs if run.producer.stage in stages]
        for other in others:
            names = Names(first, other)
            copied += [names.rows(run) for run in of_first]
    return [*runs, *copied]


def _original_runs(plan: Plan) -> list[ProducerRows]:
    routing = routing_of(plan)
    drafts = [row for boundary in _boundaries(routing) for row in _drafts(plan, boundary)]
    ticks = issue_ticks(plan, drafts)
    by_producer: dict[Action, list[RowDraft]] = {}
    for draft in drafts:
        by_producer.setdefault(draft.producer, []).append(draft)
    return [
        ProducerRows(
            ticks[producer], producer, tuple(sorted(held, key=lambda draft: issue_key(draft.consumer)))
        )
        for producer, held in by_producer.items()
    ]
