"""How much work a microbatch is: tokens and attention area of its packed rows."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import ge

import numpy as np

from workbench.arrays import Ints
from workbench.cost.roofline import RowWork, Work
from workbench.data.sample import Item, Sample, Segment
from workbench.float_sum import float_sum
from workbench.masks.bitfield import Bitfield, concatenate
from workbench.masks.builders import chunked, full, narrowed
from workbench.masks.patterns import CAUSAL, FULL, sample_bitfield
from workbench.masks.tiles import area
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Module
from workbench.model.reach import ANY, Reach
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.joint import microbatch_apart, replicas_apart, row_replicas
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.token_owners import zigzag_blocks


def attention_area(sample: Sample, reach: Reach = ANY) -> int:
    """Count the query-key pairs of one sample in the LLM; ValueError for an unknown or unfitting mask.

    Args:
        sample: any sample.
        reach: limit of a layer's queries, applied to the mask (see `within`).
    """
    length = sample.num_tokens
    if sample.mask == CAUSAL:
        num_chunks, rest = divmod(length, reach.chunk or length)
        return num_chunks * _causal_pairs(reach.chunk or length, reach.window) + _causal_pairs(
            rest, reach.window
        )
    if sample.mask == FULL and reach == ANY:
        return length * length
    return _masked_area(sample.segments, sample.mask, reach)


def _causal_pairs(length: int, window: int | None) -> int:
    """Count the pairs of causal tokens within a sliding window."""
    longest = length if window is None else min(window, length)
    return longest * length - longest * (longest - 1) // 2


@cache
def _masked_area(segments: tuple[Segment, ...], mask: str, reach: Reach) -> int:
    field = sample_bitfield([[Sample(0, segments, mask)]])
    return area(within(field, reach), field)


def within(field: Bitfield, reach: Reach) -> Bitfield:
    """Limit whole rows of tokens to a reach; the field itself where the reach is unlimited."""
    return narrowed(chunked(field, reach.chunk), reach.window)


RowKind = tuple[tuple[int, int], ...]
_Share = tuple[float, ...]  # tokens, pairs, and pairs within each of the module's reaches
_KINDS: LruCache[dict[int, int]] = LruCache(64)
_EVEN: LruCache[Work] = LruCache(65_536)  # by rows, and by row kinds
_SHARES: LruCache[list[_Share]] = LruCache(65_536)
_SHARED: LruCache[tuple[Work, ...]] = LruCache(65_536)
_Blocks = tuple[int, tuple[int, ...]]  # tokens of each, and owners


def row_kind(plan: Plan, items: tuple[Item, ...]) -> RowKind:
    """Return what decides a row's mask and work within its batch and module; equal for rows of equal samples.

    Complexity: O(items), and O(batch) once for a batch.
    """
    kinds = sample_kinds(plan.batch)
    return tuple([(kinds[item.sample], item.k) for item in items])


def row_kinds(plan: Plan, microbatch: Microbatch) -> tuple[RowKind, ...]:
    """Return `row_kind` of every row of a microbatch."""
    kinds = sample_kinds(plan.batch)
    return tuple([tuple([(kinds[item.sample], item.k) for item in row]) for row in microbatch.rows])


def sample_kinds(batch: Sequence[Sample]) -> dict[int, int]:
    """Map each sample to the first one with equal segments and mask. O(batch), once for a batch."""
    return _KINDS.get_or(Identity(batch), lambda: _kinds(batch))


def _kinds(batch: Sequence[Sample]) -> dict[int, int]:
    first: dict[tuple[tuple[Segment, ...], str], int] = {}
    return {sample.id: first.setdefault((sample.segments, sample.mask), sample.id) for sample in batch}


def work_of(plan: Plan, microbatch: Microbatch) -> Work:
    """Return tokens and query-key pairs of every row, on the context-parallel rank with the most pairs.

    Args and complexity: as `works_of`, of which it is the first.
    """
    return works_of(plan, microbatch)[0]


@cached_on_instance
def works_of(plan: Plan, microbatch: Microbatch) -> tuple[Work, ...]:
    """Return tokens and query-key pairs of every row, on each context-parallel rank that may be the slowest.

    Encoder items attend in full at their IN count, an image in tiles tile by tile, samples in the LLM by
    their mask; items of a row do not attend to each other. Owners come from token shards, without them from
    zigzag; a draft that has no stages yet counts as split evenly. Every row counts as cp times a rank's
    share, so that an even split of it is that rank's work. Joint replicas have whole rows. A rank is left out
    if another has at least its tokens and pairs; the one with the most pairs is first.

    Differs: zigzag of a row of equal items under a causal or full mask counts as even, which it is but for
    the last of its 2 cp blocks, which may be short.

    Complexity: O(items + cp log cp) where the split is even; other rows go through the tiles of their mask,
    once for rows of equal samples. Cached, as every rank of a stage asks.
    """
    chain = plan.chain.get((microbatch.module, microbatch.replica))
    if not chain or chain[0].joint_replicas == 1:
        return works_over(plan, microbatch, chain[0].cp if chain else 1)
    return _slowest_of(_joint_works(plan, microbatch))


def works_over(plan: Plan, microbatch: Microbatch, num_owners: int) -> tuple[Work, ...]:
    """As `works_of`, if `num_owners` context-parallel ranks shared the rows, whatever the stages are."""
    even = even_work_of(plan, microbatch)
    if num_owners == 1:
        return (even,)
    key_of_microbatch = microbatch.module, microbatch.replica, microbatch.index
    shards = [plan.token_shard.get((*key_of_microbatch, row)) for row in range(len(microbatch.rows))]
    blocks = tuple([None if shard is None else (shard.block_tokens, shard.owners) for shard in shards])
    decisive = Identity(plan.model), Identity(plan.batch), microbatch.module, row_kinds(plan, microbatch)
    key = *decisive, blocks, num_owners
    return _SHARED.get_or(key, lambda: _works_over(plan, microbatch, even, blocks, num_owners))


def _joint_works(plan: Plan, microbatch: Microbatch) -> list[Work]:
    """Return the works of all joint replicas; experts get the rows of all that distribute them."""
    stage, apart = plan.chain[microbatch.module, microbatch.replica][0], replicas_apart(plan)
    parts = [microbatch_apart(plan, microbatch, number) for number in range(stage.joint_replicas)]
    works = [works_over(apart, part, stage.cp) if part.rows else () for part in parts]
    means = mean_tokens(plan, microbatch)
    return [
        with_experts_load(work, mean)
        for of_replica, mean in zip(works, means, strict=True)
        for work in of_replica
    ]


def with_experts_load(work: Work, mean: float | None) -> Work:
    """The work, whose experts get the rows of replicas with so many tokens in the mean; None: its own."""
    return work if mean is None else Work(work.rows, experts_load=mean / work.tokens(TokenCount.IN))


def mean_tokens(plan: Plan, microbatch: Microbatch) -> list[float | None]:
    """[joint replicas] mean tokens of the replicas that distribute experts with each; None: each has all."""
    stage = plan.chain[microbatch.module, microbatch.replica][0]
    together = stage.ep // (stage.tp * stage.cp)
    if together <= 1:
        return [None] * stage.joint_replicas
    tokens = _tokens_in(plan, microbatch)
    return [
        sum(tokens[first : first + together]) / together
        for number in range(stage.joint_replicas)
        for first in [number - number % together]
    ]


def _tokens_in(plan: Plan, microbatch: Microbatch) -> list[int]:
    """[joint replicas] tokens of the rows of each."""
    module = plan.model.module(microbatch.module)
    tokens = [0] * plan.chain[microbatch.module, microbatch.replica][0].joint_replicas
    for row, number in zip(microbatch.rows, row_replicas(plan, microbatch), strict=True):
        tokens[number] += sum(_item(plan, module, item)[0] for item in row)
    return tokens


def _slowest_of(works: Sequence[Work]) -> tuple[Work, ...]:
    """Return the works that no other equals or exceeds in tokens and pairs, the one with most pairs first."""
    totals = [[(float(work.tokens(TokenCount.IN)), float(work.attention_area))] for work in works]
    return tuple(works[index] for index in _busiest(totals))


def _works_over(
    plan: Plan, microbatch: Microbatch, even: Work, blocks: Sequence[_Blocks | None], num_owners: int
) -> tuple[Work, ...]:
    module = plan.model.module(microbatch.module)
    by_row = [
        _row_shares(plan, module, row, row_blocks, num_owners)
        for row, row_blocks in zip(microbatch.rows, blocks, strict=True)
    ]
    by_owner = list(zip(*by_row, strict=True))
    if len(set(by_owner)) == 1:
        return (even,)
    return tuple(
        Work(
            tuple(
                _row_of_owner(row, module, share, num_owners)
                for row, share in zip(even.rows, shares, strict=True)
            )
        )
        for shares in map(by_owner.__getitem__, _busiest(by_owner))
    )


def _busiest(by_owner: Sequence[Sequence[_Share]]) -> list[int]:
    """Return the owners that no other owner equals or exceeds in tokens and pairs, by falling pairs."""
    totals = [tuple(map(float_sum, zip(*rows, strict=True))) for rows in by_owner]
    busiest: list[int] = []
    for owner in sorted(range(len(totals)), key=lambda o: (totals[o][1], totals[o], -o), reverse=True):
        if not any(all(map(ge, totals[other], totals[owner])) for other in busiest):
            busiest.append(owner)
    return busiest


def even_work_of(plan: Plan, microbatch: Microbatch) -> Work:
    """Return the work as if every rank had an equal share; rows of equal samples share one object."""
    name, decisive = microbatch.module, (Identity(plan.model), Identity(plan.batch))

    def of_kinds() -> Work:
        return _EVEN.get_or((*decisive, name, row_kinds(plan, microbatch)), of_rows)

    def of_rows() -> Work:
        module = plan.model.module(name)
        return Work(tuple(_row(plan, module, row) for row in microbatch.rows))

    return _EVEN.get_or((*decisive, name, microbatch.rows), of_kinds)


def _row(plan: Plan, module: Module, items: tuple[Item, ...]) -> RowWork:
    tokens_in = tokens_out = area = context = readers = pairs_read = 0
    for item in items:
        item_in, item_out, item_area = _item(plan, module, item)
        tokens_in += item_in
        tokens_out += item_out
        area += item_area
        context_here = _context_tokens(plan, module, item)
        context += context_here
        readers += item_in if context_here else 0
        pairs_read += item_in * context_here
    pairs_by_reach = ((reach, _reached(plan, items, reach)) for reach in module.reaches)
    reached = tuple((reach, pairs) for reach, pairs in pairs_by_reach if pairs < area)
    return RowWork(tokens_in, tokens_out, area, context, readers, pairs_read, reached)


def _reached(plan: Plan, items: tuple[Item, ...], reach: Reach) -> int:
    return sum(attention_area(plan.sample[item.sample], reach) for item in items)


def _context_tokens(plan: Plan, module: Module, item: Item) -> int:
    """Count the tokens that other modules provide of the item's sample for cross-attention."""
    total = 0
    for edge in plan.model.edges_into(module.name):
        if plan.model.is_context(edge):
            source = plan.model.module(edge.source)
            counts_in = source.layers[edge.after_layer].emits is TokenCount.IN
            segments = plan.sample[item.sample].of(source.modality)
            total += sum(segment.tokens_in if counts_in else segment.tokens_out for segment in segments)
    return total


def _item(plan: Plan, module: Module, item: Item) -> tuple[int, int, int]:
    sample = plan.sample[item.sample]
    if module.modality == TEXT:
        return sample.num_tokens, sample.num_tokens, attention_area(sample)
    segment = _segment(plan, module, item)
    return segment.tokens_in, segment.tokens_out, segment.tokens_in * segment.tile_tokens


def _segment(plan: Plan, module: Module, item: Item) -> Segment:
    """Of an encoder's item, or a generator's."""
    sample = plan.sample[item.sample]
    for segment in sample.of(module.modality):
        if segment.k == item.k:
            return segment
    raise ValueError(f"sample {sample.id} has no {module.modality} item {item.k} for module {module.name!r}")


def _row_shares(
    plan: Plan, module: Module, items: tuple[Item, ...], blocks: _Blocks | None, num_owners: int
) -> list[_Share]:
    """[owner] share of one row; blocks None: zigzag."""
    decisive = Identity(plan.model), Identity(plan.batch), module.name, row_kind(plan, items)
    key = *decisive, blocks, num_owners
    return _SHARES.get_or(key, lambda: _shares_of(plan, module, items, blocks, num_owners))


def _shares_of(
    plan: Plan, module: Module, items: tuple[Item, ...], blocks: _Blocks | None, num_owners: int
) -> list[_Share]:
    row = _row(plan, module, items)
    tokens, pairs = row.tokens_in / num_owners, row.attention_area / num_owners
    is_even = blocks is None and _is_even(plan, module, items)
    if is_even and not row.reached:
        return [(tokens, pairs, *[pairs] * len(module.reaches))] * num_owners
    field = row_mask(plan, module, items)
    block_tokens, owner_of = blocks or zigzag_blocks(len(field), num_owners)
    owners = np.repeat(np.asarray(owner_of), block_tokens)[: len(field)]
    owned = [np.flatnonzero(owners == owner) for owner in range(num_owners)]
    shares = [(tokens, pairs)] * num_owners
    if not is_even:
        shares = [(float(len(indices)), float(area(field.take(indices), field))) for indices in owned]
    limited = {reach: within(field, reach) for reach, _ in row.reached}
    return [
        (*of_all, *(_pairs(limited.get(reach), indices, field, of_all[1]) for reach in module.reaches))
        for indices, of_all in zip(owned, shares, strict=True)
    ]


def _pairs(limited: Bitfield | None, indices: Ints, keys: Bitfield, of_all: float) -> float:
    return of_all if limited is None else float(area(limited.take(indices), keys))


def _is_even(plan: Plan, module: Module, items: tuple[Item, ...]) -> bool:
    """Whether zigzag splits a row evenly: a token and its mirror image see as many as any other such pair."""
    if module.modality == TEXT and any(plan.sample[i.sample].mask not in (CAUSAL, FULL) for i in items):
        return False
    if module.modality != TEXT and any(_segment(plan, module, item).num_tiles > 1 for item in items):
        return False  # tiles lie across the blocks
    return len({_item(plan, module, item) for item in items}) <= 1


def row_mask(plan: Plan, module: Module, items: tuple[Item, ...]) -> Bitfield:
    """Return which IN tokens of one row attend to which."""
    if module.modality == TEXT:
        return sample_bitfield([[plan.sample[item.sample] for item in items]])
    segments = [_segment(plan, module, item) for item in items]
    return concatenate([full(each.tile_tokens) for each in segments for _ in range(each.num_tiles)])


def _row_of_owner(row: RowWork, module: Module, share: _Share, num_owners: int) -> RowWork:
    tokens, pairs, *within_reach = share
    tokens_in = max(1, round(tokens * num_owners))
    tokens_out = max(1, -(-row.tokens_out * tokens_in // row.tokens_in))  # together no fewer than there are
    hides = {reach for reach, _ in row.reached}
    reached = tuple(
        (reach, round(pairs_in_reach * num_owners))
        for reach, pairs_in_reach in zip(module.reaches, within_reach, strict=True)
        if reach in hides
    )
    return replace(
        row,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        attention_area=round(pairs * num_owners),
        reached=reached,
    )
