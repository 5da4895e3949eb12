"""Which context-parallel rank holds which tokens of a microbatch, from token shards."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.data.sample import Item
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Edge
from workbench.plan.plan import Microbatch, Plan, TokenShard
from workbench.plan.routing import Routing

TokenIndices = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Consecutive tokens of one item that one rank holds.

    Args:
        item: whose.
        first: the first of them, counted inside the item.
        start: its index in the tensor that the run is about.
        num_tokens: how many.
    """

    item: Item
    first: int
    start: int
    num_tokens: int


def row_tokens(routing: Routing, microbatch: Microbatch) -> tuple[int, ...]:
    """Return the tokens of every row inside the module (IN), which token shards cover."""
    module = routing.plan.model.module(microbatch.module)
    return tuple(sum(routing.tokens(module, item, TokenCount.IN) for item in row) for row in microbatch.rows)


def row_shards(routing: Routing, microbatch: Microbatch) -> tuple[TokenShard, ...]:
    """Return the token owners of every row of a microbatch: the plan's, or zigzag if it has none."""
    plan = routing.plan
    cp = plan.chain[microbatch.module, microbatch.replica][0].cp
    shards = []
    for row, num_tokens in enumerate(row_tokens(routing, microbatch)):
        key = (microbatch.module, microbatch.replica, microbatch.index, row)
        shards.append(plan.token_shard.get(key) or zigzag(key, num_tokens, cp))
    return tuple(shards)


def zigzag(key: tuple[str, int, int, int], num_tokens: int, cp: int) -> TokenShard:
    """Return 2 cp equal blocks, the i-th and the i-th from the end on rank i; a short row lacks the last.

    Args:
        key: module, replica, microbatch and row.
        num_tokens: of the row.
        cp: ranks.
    """
    module, replica, microbatch, row = key
    block_tokens, owners = zigzag_blocks(num_tokens, cp)
    return TokenShard(
        module=module,
        replica=replica,
        microbatch=microbatch,
        row=row,
        block_tokens=block_tokens,
        owners=owners,
    )


def zigzag_blocks(num_tokens: int, cp: int) -> tuple[int, tuple[int, ...]]:
    """Return the tokens of a `zigzag` block, and the owners of the blocks."""
    block_tokens = -(-num_tokens // (2 * cp))
    blocks = range(-(-num_tokens // block_tokens))
    return block_tokens, tuple(min(block, 2 * cp - 1 - block) for block in blocks)


def owned_tokens(routing: Routing, microbatch: Microbatch) -> tuple[TokenIndices, ...]:
    """Return the packed token indices of each context-parallel rank, from token shards or zigzag.

    Raises:
        ValueError: a shard whose blocks do not cover its row.
    """
    owners_of_rows: list[TokenIndices] = []
    for length, shard in zip(row_tokens(routing, microbatch), row_shards(routing, microbatch), strict=True):
        blocks, size = len(shard.owners), shard.block_tokens
        if not (blocks - 1) * size < length <= blocks * size:
            raise ValueError(
                f"token shard of {microbatch.module!r} microbatch {microbatch.index}, row {shard.row}: "
                f"{blocks} blocks of {size} do not cover {length} tokens"
            )
        owners_of_rows.append(np.repeat(np.asarray(shard.owners, dtype=np.int64), size)[:length])
    owners = np.concatenate(owners_of_rows)
    num_ranks = routing.plan.chain[microbatch.module, microbatch.replica][0].cp
    return tuple(np.flatnonzero(owners == rank) for rank in range(num_ranks))


def held_runs(routing: Routing, microbatch: Microbatch, count: TokenCount) -> tuple[tuple[Run, ...], ...]:
    """Return, per context-parallel index, the runs of the packed microbatch that a rank there holds.

    A rank keeps its tokens in ascending order, so its tokens of an item are contiguous in its own tensor.
    After a layer that changes the number of tokens, a token belongs to the owner of the one at the same
    fraction of the item.

    Complexity: O(blocks + items).
    """
    plan = routing.plan
    module = plan.model.module(microbatch.module)
    cp = plan.chain[microbatch.module, microbatch.replica][0].cp
    runs: list[list[Run]] = [[] for _ in range(cp)]
    filled = [0] * cp
    for row, shard in zip(microbatch.rows, row_shards(routing, microbatch), strict=True):
        start = 0
        for item in row:
            tokens_in = routing.tokens(module, item, TokenCount.IN)
            tokens = routing.tokens(module, item, count)
            for owner, first, stop in owned_parts(shard, start, start + tokens_in):
                bounds = [-(-(bound - start) * tokens // tokens_in) for bound in (first, stop)]
                if bounds[0] < bounds[1]:
                    runs[owner].append(Run(item, bounds[0], filled[owner], bounds[1] - bounds[0]))
                    filled[owner] += bounds[1] - bounds[0]
            start += tokens_in
    return tuple(tuple(owned) for owned in runs)


def owned_parts(shard: TokenShard, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (owner, start, stop) of the parts of [start, stop) of a row; adjacent ones of one owner merge."""
    while start < stop:
        block = start // shard.block_tokens
        owner = shard.owners[block]
        while block < len(shard.owners) and shard.owners[block] == owner:
            block += 1
        end = min(stop, block * shard.block_tokens)
        yield owner, start, end
        start = end


def feature_runs(routing: Routing, edge: Edge, microbatch: Microbatch) -> tuple[tuple[Run, ...], ...]:
    """Return, per context-parallel index of the target, the features whose gradient a rank there holds.

    A feature in the target's sequence belongs to the owner of its position, which alone receives it: `start`
    counts in the tensor of its own features, in the edge's order. A feature outside of the sequence (context
    of a cross-attention) is read by every rank, and each holds a part of its gradient: `start` counts in the
    whole tensor of the edge, which all receive.

    Complexity: O(blocks + segments).
    """
    plan = routing.plan
    cp = plan.chain[microbatch.module, microbatch.replica][0].cp
    source = plan.model.module(edge.source)
    count = source.layers[edge.after_layer].emits
    wanted = routing.wanted(edge, microbatch)
    tokens = [routing.tokens(source, item, count) for item in wanted]
    starts = dict(zip(wanted, accumulate(tokens, initial=0), strict=False))
    all_runs = tuple(Run(item, 0, starts[item], n) for item, n in zip(wanted, tokens, strict=True))
    positions = _feature_positions(plan, edge, microbatch)
    if cp == 1 or positions is None:
        return (all_runs,) * cp
    shards = row_shards(routing, microbatch)
    runs_of: list[list[Run]] = [[] for _ in range(cp)]
    filled = [0] * cp
    for run in all_runs:
        row, index = positions[run.item]
        for owner, first, stop in owned_parts(shards[row], index, index + run.num_tokens):
            runs_of[owner].append(Run(run.item, first - index, filled[owner], stop - first))
            filled[owner] += stop - first
    return tuple(tuple(runs) for runs in runs_of)


def goes_to_owners(routing: Routing, edge: Edge, microbatch: Microbatch) -> bool:
    """Whether each context-parallel rank of the target receives only the features that it owns."""
    plan = routing.plan
    cp = plan.chain[microbatch.module, microbatch.replica][0].cp
    return cp > 1 and _enters_sequence(plan, edge)


def _feature_positions(plan: Plan, edge: Edge, microbatch: Microbatch) -> dict[Item, tuple[int, int]] | None:
    """Map an edge's items to (row, position) of the first token; None if features are not in the sequence."""
    modality = plan.model.module(edge.source).modality
    if not _enters_sequence(plan, edge):
        return None
    position_of: dict[Item, tuple[int, int]] = {}
    for row, items in enumerate(microbatch.rows):
        index = 0
        for item in items:
            for segment in plan.sample[item.sample].segments:
                if segment.modality == modality:
                    position_of[Item(item.sample, segment.k)] = row, index
                index += segment.tokens_out
    return position_of


def _enters_sequence(plan: Plan, edge: Edge) -> bool:
    """Whether features of an edge become part of the target's sequence."""
    return plan.model.module(edge.target).modality == TEXT and not plan.model.is_context(edge)
