"""From a plan to what machines need: transfer rows and their order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from workbench.data.sample import Item
from workbench.graph.layer import Layer, TokenCount
from workbench.graph.model_graph import Edge
from workbench.plan.gradient_groups import gradient_groups, reductions
from workbench.plan.lowered import Direction, Lowered, Route, Slice, Transfer
from workbench.plan.order import issue_ticks
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.plan.routing import Holding, Routing
from workbench.schedule.action import Action, Pass


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
    routing = Routing(plan)
    drafts = [row for boundary in _boundaries(routing) for row in _rows(routing, boundary)]
    transfers = _in_issue_order(plan, drafts)
    inputs: dict[Action, list[int]] = {}
    outputs: dict[Action, list[int]] = {}
    for transfer in transfers:
        inputs.setdefault(transfer.consumer, []).append(transfer.row)
        outputs.setdefault(transfer.producer, []).append(transfer.row)
    groups = gradient_groups(plan)
    return Lowered(
        plan=plan,
        transfers=transfers,
        inputs={action: tuple(rows) for action, rows in inputs.items()},
        outputs={action: tuple(rows) for action, rows in outputs.items()},
        groups=groups,
        reductions=reductions(plan, groups),
    )


@dataclass(frozen=True, slots=True)
class _Boundary:
    """A tensor that crosses from one stage to another for one pair of microbatches."""

    edge: str
    producer: Stage
    consumer: Stage
    source: Microbatch
    target: Microbatch
    after_layer: int
    slices: tuple[Slice, ...]
    carries_gradient: bool


def _boundaries(routing: Routing) -> Iterator[_Boundary]:
    plan = routing.plan
    for (module, replica), chain in plan.chain.items():
        for microbatch in plan.microbatches_of.get((module, replica), ()):
            carries = routing.flow(microbatch).carries[module]
            for producer, consumer in pairwise(chain):
                after_layer = producer.layers[1] - 1
                slices = _whole(routing, microbatch, after_layer)
                gradient = carries[after_layer] and routing.has_backward(consumer, microbatch)
                yield _Boundary(
                    module, producer, consumer, microbatch, microbatch, after_layer, slices, gradient
                )
    for edge in plan.model.edges:
        yield from _edge_boundaries(routing, edge)


def _edge_boundaries(routing: Routing, edge: Edge) -> Iterator[_Boundary]:
    plan = routing.plan
    for replica in plan.replicas(edge.target):
        consumer = routing.boundary_stage(edge.target, replica, edge.before_layer)
        for target in plan.microbatches_of.get((edge.target, replica), ()):
            for holding, slices in _sources(routing, edge, consumer, target).items():
                source = plan.microbatches_of[edge.source, holding.replica][holding.microbatch]
                producer = routing.boundary_stage(edge.source, holding.replica, edge.after_layer)
                carries = routing.flow(source).carries[edge.source][edge.after_layer]
                gradient = carries and routing.has_backward(consumer, target)
                yield _Boundary(
                    edge.name, producer, consumer, source, target, edge.after_layer, tuple(slices), gradient
                )


def _whole(routing: Routing, microbatch: Microbatch, after_layer: int) -> tuple[Slice, ...]:
    """Every item of a microbatch, at the same place on both sides."""
    offsets = _offsets(routing, microbatch, after_layer)
    return tuple(Slice(item, start, start, tokens) for item, (start, tokens) in offsets.items())


def _offsets(routing: Routing, microbatch: Microbatch, after_layer: int) -> dict[Item, tuple[int, int]]:
    """(start, tokens) of every item in the packed output of a layer."""
    module = routing.plan.model.module(microbatch.module)
    count = _emitted(module.layers, after_layer)
    offsets, start = {}, 0
    for item in microbatch.items:
        tokens = routing.tokens(module, item, count)
        offsets[item] = (start, tokens)
        start += tokens
    return offsets


def _emitted(layers: tuple[Layer, ...], after_layer: int) -> TokenCount:
    return layers[after_layer].emits


def _sources(routing: Routing, edge: Edge, consumer: Stage, target: Microbatch) -> dict[Holding, list[Slice]]:
    """Where the items of an edge come from, in the order in which the consumer needs them."""
    plan = routing.plan
    found: dict[Holding, list[Slice]] = {}
    offsets: dict[Holding, dict[Item, tuple[int, int]]] = {}
    destination_start = 0
    for item in routing.wanted(edge, target):
        holding = routing.holding(edge, item, consumer)
        if holding not in offsets:
            source = plan.microbatches_of[edge.source, holding.replica][holding.microbatch]
            offsets[holding] = _offsets(routing, source, edge.after_layer)
        start, tokens = offsets[holding][item]
        found.setdefault(holding, []).append(Slice(item, start, destination_start, tokens))
        destination_start += tokens
    return found


def _rows(routing: Routing, boundary: _Boundary) -> Iterator[Transfer]:
    """The rows of one boundary, forward and, where a gradient flows, its exact transpose."""
    yield from _directed(routing.plan, boundary, Direction.FORWARD)
    if boundary.carries_gradient:
        yield from _directed(routing.plan, boundary, Direction.BACKWARD)


def _directed(plan: Plan, boundary: _Boundary, direction: Direction) -> Iterator[Transfer]:
    producer = Action(boundary.producer.id, Pass.F, boundary.source.index)
    consumer = Action(boundary.consumer.id, Pass.F, boundary.target.index)
    source, destination, slices = boundary.producer, boundary.consumer, boundary.slices
    if direction is Direction.BACKWARD:
        producer, consumer = (
            _backward_action(plan, destination, boundary.target.index),
            _backward_action(plan, source, boundary.source.index),
        )
        source, destination = destination, source
        slices = tuple(Slice(s.item, s.destination_start, s.source_start, s.num_tokens) for s in slices)
    num_tokens = sum(piece.num_tokens for piece in slices)
    width = plan.model.module(boundary.producer.module).layers[boundary.after_layer].out_width
    draft = Transfer(
        row=-1,
        edge=boundary.edge,
        direction=direction,
        route=Route.P2P,
        producer=producer,
        consumer=consumer,
        source_rank=-1,
        destination_ranks=(),
        slices=slices,
        num_tokens=num_tokens,
        width=width,
        num_bytes=num_tokens * width * plan.settings.precision.num_bytes,
    )
    same_grid = (source.cp, source.tp) == (destination.cp, destination.tp)
    if boundary.producer.module == boundary.consumer.module and same_grid:
        yield from _rank_to_rank(draft, source, destination)
    else:
        yield from _leader_to_group(draft, source, destination)


def _backward_action(plan: Plan, stage: Stage, microbatch: int) -> Action:
    """The action that computes the input gradient: `I` where the plan splits the backward, else `B`."""
    split = Action(stage.id, Pass.I, microbatch)
    return split if split in plan.program_actions else Action(stage.id, Pass.B, microbatch)


def _rank_to_rank(draft: Transfer, source: Stage, destination: Stage) -> Iterator[Transfer]:
    """Between stages of one module: each rank to the rank at its place in the grid."""
    for from_rank, to_rank in zip(source.flat_ranks, destination.flat_ranks, strict=True):
        shard = -(-draft.num_tokens // source.cp)
        share = draft.num_bytes // draft.num_tokens * shard
        yield replace(
            draft,
            source_rank=from_rank,
            destination_ranks=(to_rank,),
            num_tokens=shard,
            num_bytes=share,
            route=Route.LOCAL if from_rank == to_rank else Route.P2P,
        )


def _leader_to_group(draft: Transfer, source: Stage, destination: Stage) -> Iterator[Transfer]:
    """Between modules: leader to leader, then broadcast in the receiving tp x cp group.

    The broadcast's `after` holds -2 until rows are numbered: the row just before it.
    """
    leader, *others = destination.flat_ranks
    if leader in source.flat_ranks:  # every rank of a stage holds its whole output
        yield replace(draft, source_rank=leader, destination_ranks=(leader,), route=Route.LOCAL)
    else:
        yield replace(draft, source_rank=source.flat_ranks[0], destination_ranks=(leader,))
    if others:
        yield replace(
            draft,
            source_rank=leader,
            destination_ranks=tuple(others),
            route=Route.BROADCAST,
            after=_ROW_BEFORE,
        )


_ROW_BEFORE = -2


def _in_issue_order(plan: Plan, drafts: list[Transfer]) -> tuple[Transfer, ...]:
    """Number the rows by (tick of the producer, producer, consumer); pieces of one boundary stay together."""
    ticks = issue_ticks(plan, drafts)
    order = sorted(
        range(len(drafts)),
        key=lambda i: (ticks[drafts[i].producer], _key(drafts[i].producer), _key(drafts[i].consumer), i),
    )
    return tuple(
        replace(drafts[i], row=row, after=None if drafts[i].after is None else row - 1)
        for row, i in enumerate(order)
    )


def _key(action: Action) -> tuple[int, str, int]:
    return (action.stage or 0, action.kind, action.microbatch or 0)
