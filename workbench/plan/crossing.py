"""What one microbatch has of another, or hands on: once for all that differ in their samples alone."""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from workbench.data.sample import Item
from workbench.model.layer import TokenCount
from workbench.plan.lowered import Slice
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Routing
from workbench.plan.token_owners import Run
from workbench.plan.work import sample_kinds


class Part(NamedTuple):
    """Tokens that one context-parallel place of a stage sends to one of another; None: to all its ranks."""

    slices: tuple[Slice, ...]
    source: int
    destination: int | None
    num_tokens: int


def shape_of(
    plan: Plan, microbatches: Sequence[Microbatch], items: Iterable[Item]
) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """All that decides what crosses between microbatches, whatever their samples are called; and these.

    Args:
        plan: theirs.
        microbatches: that produces, and that consumes.
        items: that cross.

    Complexity: O(items).
    """
    at: dict[int, int] = {}
    of_each = tuple(
        [
            (
                plan.chain[m.module, m.replica][0].cp,
                tuple([tuple([(at.setdefault(s, len(at)), k) for s, k in row]) for row in m.rows]),
                _owners(plan, m) if plan.token_shards else None,
            )
            for m in microbatches
        ]
    )
    crossing = tuple([(at[sample], k) for sample, k in items])  # not all in both where several hold an item
    kinds = sample_kinds(plan.batch)
    return (of_each, crossing, tuple([kinds[sample] for sample in at])), tuple(at)


def _owners(plan: Plan, microbatch: Microbatch) -> tuple[object, ...]:
    """Of the tokens of its rows, where the plan says."""
    keys = [
        (microbatch.module, microbatch.replica, microbatch.index, row) for row in range(len(microbatch.rows))
    ]
    shards = map(plan.token_shard.get, keys)
    return tuple([shard and (shard.block_tokens, shard.owners) for shard in shards])


def parts(each: Sequence[tuple[tuple[Slice, ...], int, int | None]]) -> tuple[Part, ...]:
    """Of slices, source and destination those with tokens."""
    counted = [Part(*one, sum([piece.num_tokens for piece in one[0]])) for one in each]
    return tuple([part for part in counted if part.num_tokens])


def exchanged(
    sources: Sequence[Sequence[Run]], destinations: Sequence[Sequence[Run]], wanted: Container[Item]
) -> tuple[Part, ...]:
    """What each place of one side holds and each place of the other has in its tensor, of the wanted items.

    Complexity: O(runs x places).
    """
    held: list[dict[Item, list[Run]]] = []
    for runs in destinations:
        held.append({})
        for run in runs:
            if run.item in wanted:
                held[-1].setdefault(run.item, []).append(run)
    return parts(
        [
            (_common(runs, of_item), here, there)
            for here, runs in enumerate(sources)
            for there, of_item in enumerate(held)
        ]
    )


def _common(runs: Sequence[Run], others: Mapping[Item, Sequence[Run]]) -> tuple[Slice, ...]:
    """The tokens of runs that stand in runs of another tensor, with their places in both."""
    found = []
    for item, run_first, run_start, run_tokens in runs:
        for _, other_first, other_start, other_tokens in others.get(item, ()):
            first = other_first if other_first > run_first else run_first
            num_tokens = min(run_first + run_tokens, other_first + other_tokens) - first
            if num_tokens > 0:
                starts = run_start + first - run_first, other_start + first - other_first
                found.append(Slice(item, *starts, num_tokens))
    return tuple(found)


def inside(held: Sequence[Sequence[Run]]) -> tuple[Part, ...]:
    """By place, what a rank holds of every item: at the same place on both sides."""
    found = []
    for place, runs in enumerate(held):
        of_item: dict[Item, Slice] = {}
        for run in runs:
            so_far = of_item.get(run.item, Slice(run.item, run.start, run.start, 0))
            of_item[run.item] = so_far._replace(num_tokens=so_far.num_tokens + run.num_tokens)
        found.append((tuple(of_item.values()), place, place))
    return parts(found)


def sent(made: Sequence[Sequence[Run]], starts: Mapping[Item, int]) -> tuple[Part, ...]:
    """By place, what a producer has of an edge's items, in the order in which the consumer needs them."""
    found = []
    for place, runs in enumerate(made):
        held: dict[Item, list[Run]] = {}
        for run in runs:
            held.setdefault(run.item, []).append(run)
        slices = tuple(
            Slice(item, run.start, start + run.first, run.num_tokens)
            for item, start in starts.items()
            for run in held.get(item, ())
        )
        found.append((slices, place, None))
    return parts(found)


def returned(
    features: Sequence[Sequence[Run]], packed: Mapping[Item, int], starts: Mapping[Item, int]
) -> tuple[Part, ...]:
    """By context-parallel place of the consumer, the gradients of one producer's items."""
    found = []
    for place, runs in enumerate(features):
        slices = tuple(
            Slice(run.item, run.start, packed[run.item] + run.first, run.num_tokens)
            for run in runs
            if run.item in starts
        )
        found.append((slices, place, None))
    return parts(found)


def offsets(routing: Routing, microbatch: Microbatch, count: TokenCount) -> dict[Item, int]:
    """Where every item starts in the whole packed tensor."""
    module = routing.plan.model.module(microbatch.module)
    tokens = [routing.tokens(module, item, count) for item in microbatch.items]
    return dict(zip(microbatch.items, accumulate(tokens, initial=0), strict=False))
