"""Which tokens one microbatch sends to another, computed once for all that differ in their samples alone."""

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
    """Tokens that one share of a stage sends to a share of another.

    Args:
        slices: of items.
        source: index in the sending stage.
        destination: index in the receiving stage; None: all its ranks.
        num_tokens: of all slices together.
    """

    slices: tuple[Slice, ...]
    source: int
    destination: int | None
    num_tokens: int


def shape_of(
    plan: Plan, microbatches: Sequence[Microbatch], items: Iterable[Item]
) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Return a key, free of sample ids, of what crosses between microbatches, and the ids.

    Args:
        plan: theirs.
        microbatches: the producing one and the consuming one.
        items: that cross.

    Complexity: O(items).
    """
    number_of: dict[int, int] = {}
    shapes = tuple(
        [
            (
                _grid(plan, m),
                tuple(
                    [tuple([(number_of.setdefault(s, len(number_of)), k) for s, k in row]) for row in m.rows]
                ),
                _owners(plan, m) if plan.token_shards else None,
            )
            for m in microbatches
        ]
    )
    # Not all are in both microbatches where several hold an item.
    crossing = tuple([(number_of[sample], k) for sample, k in items])
    kinds = sample_kinds(plan.batch)
    return (shapes, crossing, tuple([kinds[sample] for sample in number_of])), tuple(number_of)


def _grid(plan: Plan, microbatch: Microbatch) -> tuple[int, int]:
    stage = plan.chain[microbatch.module, microbatch.replica][0]
    return stage.joint_replicas, stage.cp


def _owners(plan: Plan, microbatch: Microbatch) -> tuple[object, ...]:
    """Token owners of the microbatch's rows, where the plan has them."""
    keys = [
        (microbatch.module, microbatch.replica, microbatch.index, row) for row in range(len(microbatch.rows))
    ]
    shards = map(plan.token_shard.get, keys)
    return tuple([shard and (shard.block_tokens, shard.owners) for shard in shards])


def parts(drafts: Sequence[tuple[tuple[Slice, ...], int, int | None]]) -> tuple[Part, ...]:
    """Build parts from (slices, source, destination), without those that have no tokens."""
    counted = [Part(*draft, sum([piece.num_tokens for piece in draft[0]])) for draft in drafts]
    return tuple([part for part in counted if part.num_tokens])


def exchanged(
    sources: Sequence[Sequence[Run]], destinations: Sequence[Sequence[Run]], wanted: Container[Item]
) -> tuple[Part, ...]:
    """Return which wanted tokens each source index holds and each destination index has in its tensor.

    Complexity: O(runs x shares).
    """
    runs_by_item: list[dict[Item, list[Run]]] = []
    for runs in destinations:
        runs_by_item.append({})
        for run in runs:
            if run.item in wanted:
                runs_by_item[-1].setdefault(run.item, []).append(run)
    return parts(
        [
            (_common(runs, by_item), source, destination)
            for source, runs in enumerate(sources)
            for destination, by_item in enumerate(runs_by_item)
        ]
    )


def _common(runs: Sequence[Run], others: Mapping[Item, Sequence[Run]]) -> tuple[Slice, ...]:
    """Return the tokens common to runs of two tensors, with their start in both."""
    slices = []
    for item, run_first, run_start, run_tokens in runs:
        for _, other_first, other_start, other_tokens in others.get(item, ()):
            first = other_first if other_first > run_first else run_first
            num_tokens = min(run_first + run_tokens, other_first + other_tokens) - first
            if num_tokens > 0:
                starts = run_start + first - run_first, other_start + first - other_first
                slices.append(Slice(item, *starts, num_tokens))
    return tuple(slices)


def inside(runs_by_share: Sequence[Sequence[Run]]) -> tuple[Part, ...]:
    """Return what each share holds of every item; it sends to the same index."""
    drafts = []
    for share, runs in enumerate(runs_by_share):
        by_item: dict[Item, Slice] = {}
        for run in runs:
            so_far = by_item.get(run.item, Slice(run.item, run.start, run.start, 0))
            by_item[run.item] = so_far._replace(num_tokens=so_far.num_tokens + run.num_tokens)
        drafts.append((tuple(by_item.values()), share, share))
    return parts(drafts)


def sent(runs_by_share: Sequence[Sequence[Run]], starts: Mapping[Item, int]) -> tuple[Part, ...]:
    """Return what each share of a producer has of an edge, in the consumer's order."""
    drafts = []
    for share, runs in enumerate(runs_by_share):
        by_item: dict[Item, list[Run]] = {}
        for run in runs:
            by_item.setdefault(run.item, []).append(run)
        slices = tuple(
            Slice(item, run.start, start + run.first, run.num_tokens)
            for item, start in starts.items()
            for run in by_item.get(item, ())
        )
        drafts.append((slices, share, None))
    return parts(drafts)


def returned(
    runs_by_share: Sequence[Sequence[Run]], packed: Mapping[Item, int], starts: Mapping[Item, int]
) -> tuple[Part, ...]:
    """Return, per share of the consumer, the gradients of one producer's items."""
    drafts = []
    for share, runs in enumerate(runs_by_share):
        slices = tuple(
            Slice(run.item, run.start, packed[run.item] + run.first, run.num_tokens)
            for run in runs
            if run.item in starts
        )
        drafts.append((slices, share, None))
    return parts(drafts)


def offsets(routing: Routing, microbatch: Microbatch, count: TokenCount) -> dict[Item, int]:
    """Return where each item starts in the microbatch's packed tensor."""
    module = routing.plan.model.module(microbatch.module)
    tokens = [routing.tokens(module, item, count) for item in microbatch.items]
    return dict(zip(microbatch.items, accumulate(tokens, initial=0), strict=False))
