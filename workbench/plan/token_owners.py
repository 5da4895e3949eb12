"""Which ranks of a stage hold which tokens of a microbatch, from token shards.

A share is the part of a microbatch's tokens on one row of a stage's grid of ranks: that of a joint replica or
of a context-parallel rank. Shares are numbered as the grid's rows.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.data.sample import Item
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Edge
from workbench.plan.joint import own_rows, row_replicas
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
    """Return the token owners of every row of a microbatch: the plan's, or the default if it has none.

    The default is zigzag over the context-parallel ranks of the row's joint replica.
    """
    plan = routing.plan
    cp = plan.chain[microbatch.module, microbatch.replica][0].cp
    shards = []
    of_rows = zip(row_tokens(routing, microbatch), row_replicas(plan, microbatch), strict=True)
    for row, (num_tokens, replica) in enumerate(of_rows):
        key = (microbatch.module, microbatch.replica, microbatch.index, row)
        shards.append(plan.token_shard.get(key) or zigzag(key, num_tokens, cp, first=replica * cp))
    return tuple(shards)


def zigzag(key: tuple[str, int, int, int], num_tokens: int, cp: int, *, first: int = 0) -> TokenShard:
    """Return 2 cp equal blocks, the i-th and the i-th from the end on rank i; a short row lacks the last.

    Args:
        key: module, replica, microbatch and row.
        num_tokens: of the row.
        cp: ranks.
        first: number of the first one's share.
    """
    module, replica, microbatch, row = key
    block_tokens, owners = zigzag_blocks(num_tokens, cp)
    return TokenShard(
        module=module,
        replica=replica,
        microbatch=microbatch,
        row=row,
        block_tokens=block_tokens,
        owners=tuple(first + owner for owner in owners) if first else owners,
    )


def zigzag_blocks(num_tokens: int, cp: int) -> tuple[int, tuple[int, ...]]:
    """Return the tokens of a `zigzag` block, and the owners of the blocks."""
    block_tokens = -(-num_tokens // (2 * cp))
    blocks = range(-(-num_tokens // block_tokens))
    return block_tokens, tuple(min(block, 2 * cp - 1 - block) for block in blocks)


def owned_tokens(routing: Routing, microbatch: Microbatch) -> tuple[TokenIndices, ...]:
    """Return the packed token indices of each share.

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
    num_shares = routing.plan.chain[microbatch.module, microbatch.replica][0].num_shares
    return tuple(np.flatnonzero(owners == share) for share in range(num_shares))


def held_runs(routing: Routing, microbatch: Microbatch, count: TokenCount) -> tuple[tuple[Run, ...], ...]:
    """Return, per share, the runs of the packed microbatch in it.

    A rank keeps its tokens in ascending order, so its tokens of an item are contiguous in its own tensor.
    After a layer that changes the number of tokens, a token belongs to the owner of the one at the same
    fraction of the item.

    Complexity: O(blocks + items).
    """
    plan = routing.plan
    module = plan.model.module(microbatch.module)
    num_shares = plan.chain[microbatch.module, microbatch.replica][0].num_shares
    runs: list[list[Run]] = [[] for _ in range(num_shares)]
    filled = [0] * num_shares
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
    """Return, per share of the target, the features whose gradient a rank there holds.

    A feature in the target's sequence belongs to the owner of its position, which alone receives it: `start`
    counts in the tensor of its own features, in the edge's order. A feature outside of the sequence (context
    of a cross-attention) is read by every rank of its joint replica, and each holds a part of its gradient:
    `start` counts in the whole tensor of the edge, which all of them receive.

    Complexity: O(blocks + segments).
    """
    plan = routing.plan
    stage = plan.chain[microbatch.module, microbatch.replica][0]
    positions = _feature_positions(plan, edge, microbatch)
    if stage.num_shares == 1 or positions is None:
        of_replicas = (own_rows(plan, microbatch, replica) for replica in range(stage.joint_replicas))
        return tuple(runs for own in of_replicas for runs in (_wanted_runs(routing, edge, own),) * stage.cp)
    shards = row_shards(routing, microbatch)
    runs_of: list[list[Run]] = [[] for _ in range(stage.num_shares)]
    filled = [0] * stage.num_shares
    for run in _wanted_runs(routing, edge, microbatch):
        row, index = positions[run.item]
        for owner, first, stop in owned_parts(shards[row], index, index + run.num_tokens):
            runs_of[owner].append(Run(run.item, first - index, filled[owner], stop - first))
            filled[owner] += stop - first
    return tuple(tuple(runs) for runs in runs_of)


def _wanted_runs(routing: Routing, edge: Edge, microbatch: Microbatch) -> tuple[Run, ...]:
    """Return the features of an edge that a microbatch reads, as runs of whole items in the edge's order."""
    source = routing.plan.model.module(edge.source)
    count = source.layers[edge.after_layer].emits
    wanted = routing.wanted(edge, microbatch)
    tokens = [routing.tokens(source, item, count) for item in wanted]
    starts = accumulate(tokens, initial=0)
    return tuple(Run(item, 0, start, n) for item, start, n in zip(wanted, starts, tokens, strict=False))


def goes_to_owners(routing: Routing, edge: Edge, microbatch: Microbatch) -> bool:
    """Whether each share of the target receives only the features that it reads, not all of the edge."""
    plan = routing.plan
    stage = plan.chain[microbatch.module, microbatch.replica][0]
    return stage.joint_replicas > 1 or (stage.cp > 1 and _enters_sequence(plan, edge))


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
