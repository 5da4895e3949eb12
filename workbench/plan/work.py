"""What a microbatch works on: tokens and attention area of its packed rows."""

from collections.abc import Callable

from workbench.cost.roofline import RowWork, Work
from workbench.data.sample import Item, Sample
from workbench.graph.model_graph import TEXT, Module
from workbench.plan.plan import Microbatch, Plan, TokenShard

# Keys that query `position` of a sequence of `length` tokens sees.
_KEYS: dict[str, Callable[[int, int], int]] = {
    "causal": lambda position, length: position + 1,
    "full": lambda position, length: length,
}
_AREA: dict[str, Callable[[int], int]] = {
    "causal": lambda length: length * (length + 1) // 2,
    "full": lambda length: length * length,
}


def attention_area(sample: Sample) -> int:
    """Query-key pairs of one sample in the LLM; ValueError for a mask without a known area."""
    return _AREA[_known_mask(sample)](sample.num_tokens)


def work_of(plan: Plan, microbatch: Microbatch) -> Work:
    """Tokens and query-key pairs of every row; items of a row do not see each other.

    Encoder items attend in full at their IN count, samples in the LLM by their mask. Where
    token shards say who owns which tokens, every row counts as cp times the share of the
    context-parallel rank with the most pairs, so that an even split of it is the slowest
    rank's work.

    Complexity: O(items), plus O(tokens) where token shards are given.
    """
    module = plan.model.module(microbatch.module)
    rows = [_row(plan, module, row) for row in microbatch.rows]
    shards = {shard.row: shard for shard in plan.token_shards if _is_of(shard, microbatch)}
    if not shards:
        return Work(tuple(rows))
    num_owners = plan.chain[microbatch.module, microbatch.replica][0].cp
    shares = [
        _shares(plan, module, row, shards.get(index), num_owners) for index, row in enumerate(microbatch.rows)
    ]
    slowest = max(range(num_owners), key=lambda owner: (sum(share[owner][1] for share in shares), -owner))
    return Work(
        tuple(_owned(row, share[slowest], num_owners) for row, share in zip(rows, shares, strict=True))
    )


def _row(plan: Plan, module: Module, items: tuple[Item, ...]) -> RowWork:
    tokens_in = tokens_out = area = 0
    for item in items:
        item_in, item_out, item_area = _item(plan, module, item)
        tokens_in += item_in
        tokens_out += item_out
        area += item_area
    return RowWork(tokens_in, tokens_out, area)


def _item(plan: Plan, module: Module, item: Item) -> tuple[int, int, int]:
    sample = plan.sample[item.sample]
    if module.modality == TEXT:
        return sample.num_tokens, sample.num_tokens, attention_area(sample)
    for segment in sample.of(module.modality):
        if segment.k == item.k:
            return segment.tokens_in, segment.tokens_out, segment.tokens_in**2
    raise ValueError(f"sample {sample.id} has no {module.modality} item {item.k} for module {module.name!r}")


def _known_mask(sample: Sample) -> str:
    if sample.mask not in _AREA:
        raise ValueError(f"sample {sample.id}: mask {sample.mask!r}: want one of {', '.join(_AREA)}")
    return sample.mask


def _is_of(shard: TokenShard, microbatch: Microbatch) -> bool:
    return (shard.module, shard.replica, shard.microbatch) == (
        microbatch.module,
        microbatch.replica,
        microbatch.index,
    )


def _shares(
    plan: Plan, module: Module, items: tuple[Item, ...], shard: TokenShard | None, num_owners: int
) -> list[tuple[float, float]]:
    """[owner] (tokens, pairs) of one row."""
    keys: list[int] = []
    for item in items:
        length = _item(plan, module, item)[0]
        mask = _known_mask(plan.sample[item.sample]) if module.modality == TEXT else "full"
        keys += [_KEYS[mask](position, length) for position in range(length)]
    if shard is None:
        return [(len(keys) / num_owners, sum(keys) / num_owners)] * num_owners
    shares = [(0.0, 0.0)] * num_owners
    for block, owner in enumerate(shard.owners):
        owned = keys[block * shard.block_tokens : (block + 1) * shard.block_tokens]
        tokens, pairs = shares[owner]
        shares[owner] = (tokens + len(owned), pairs + sum(owned))
    return shares


def _owned(row: RowWork, share: tuple[float, float], num_owners: int) -> RowWork:
    tokens, pairs = share
    tokens_in = max(1, round(tokens * num_owners))
    tokens_out = max(1, round(row.tokens_out * tokens * num_owners / row.tokens_in))
    return RowWork(tokens_in, tokens_out, round(pairs * num_owners))
