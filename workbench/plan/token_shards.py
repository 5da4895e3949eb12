"""Token shards of a plan: each row of a module is cut into blocks, and a policy decides who owns them."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from workbench.balance.tokens.policies import Policy
from workbench.masks.bitfield import Bitfield
from workbench.masks.tiles import classify_runs, row_work
from workbench.model.model_graph import Module
from workbench.plan.joint import turns
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Microbatch, Plan, TokenShard
from workbench.plan.stage import Stage
from workbench.plan.work import row_kind, row_mask

BlockCosts = tuple[int, NDArray[np.float64]]  # tokens of a block of a row, the cost of every block
_COSTS: LruCache[BlockCosts] = LruCache(4_096)
_OWNED: LruCache[list[tuple[int, ...]]] = LruCache(4_096)


class Scope(Enum):
    """What a policy balances at once.

    Rows of a microbatch run in one launch, so all of them together should be balanced; positional policies,
    such as zigzag, refer to positions in one sequence.
    """

    ROW = "every row by itself"
    MICROBATCH = "the rows of a microbatch together"


def token_shards(
    plan: Plan,
    module: str,
    policy: Policy,
    *,
    block_tokens: int = 128,
    scope: Scope = Scope.MICROBATCH,
) -> tuple[TokenShard, ...]:
    """Return the owners of all blocks of a module, for `dataclasses.replace(plan, token_shards=...)`.

    The work of a block is the query-key pairs of its non-empty square tiles, classified exactly from the
    row's mask. A row too short to give every rank a block is cut into blocks of the next smaller power of two
    that does. Joint replicas take rows in turn; the rows of each are balanced by themselves.

    Args:
        plan: stages and microbatches; its own token shards are ignored.
        module: whose rows.
        policy: one of `workbench.balance.tokens.policies` or `.exchange`.
        block_tokens: tokens of a block, a power of two; the last block of a row may be shorter.
        scope: what is balanced at once.

    Returns:
        one shard per row of every microbatch of the replicas with more than one context-parallel
        rank, in the order of the plan's microbatches; nothing where there is no such replica.

    Raises:
        ValueError: no such module, a block that is no power of two, or what the policy refuses.

    Complexity: that of the tiles and of the policy.
    """
    if block_tokens < 1 or block_tokens & (block_tokens - 1):
        nearest = 1 << max(block_tokens, 1).bit_length() - 1
        raise ValueError(f"block_tokens must be a power of two, got {block_tokens}: try {nearest}")
    shards: list[TokenShard] = []
    of_module = plan.model.module(module)
    for microbatch in plan.microbatches:
        if microbatch.module != module:
            continue
        stage = plan.chain[module, microbatch.replica][0]
        if stage.cp > 1:
            rows = _row_costs(plan, of_module, microbatch, (block_tokens, stage.cp))
            owners = _owners_of_all(rows, stage, policy, scope)
            shards += [
                TokenShard(
                    module=module,
                    replica=microbatch.replica,
                    microbatch=microbatch.index,
                    row=row,
                    block_tokens=block,
                    owners=owners[row],
                )
                for row, (block, _) in enumerate(rows)
            ]
    return tuple(shards)


def _owners_of_all(
    rows: list[BlockCosts], stage: Stage, policy: Policy, scope: Scope
) -> dict[int, tuple[int, ...]]:
    """Map each row to the shares that own its blocks, those of the joint replica whose turn it is."""
    num_joint, cp = stage.joint_replicas, stage.cp
    owners: dict[int, tuple[int, ...]] = {}
    for number, own in enumerate(turns(len(rows), num_joint)):
        if not own:
            continue
        costs = [rows[row][1] for row in own]
        key = tuple(map(Identity, costs)), cp, policy, scope  # equal rows have the same costs
        of_rows = _OWNED.get_or(key, lambda costs=costs: _owners(costs, cp, policy, scope))  # type: ignore[misc]
        shares = (tuple([number * cp + rank for rank in ranks]) if number else ranks for ranks in of_rows)
        owners |= dict(zip(own, shares, strict=True))
    return owners


def _row_costs(plan: Plan, module: Module, microbatch: Microbatch, cut: tuple[int, int]) -> list[BlockCosts]:
    """[row] block costs; `cut` is the requested block size and the number of ranks."""
    return [
        _COSTS.get_or(
            (Identity(plan.model), Identity(plan.batch), module.name, row_kind(plan, items), cut),
            lambda items=items: _costs(row_mask(plan, module, items), cut),  # type: ignore[misc]
        )
        for items in microbatch.rows
    ]


def _costs(mask: Bitfield, cut: tuple[int, int]) -> BlockCosts:
    block = _fitting_block(len(mask), *cut)
    pairs = row_work(classify_runs(mask, mask, block, block)) * block**2
    return block, pairs.astype(np.float64)


def _fitting_block(num_tokens: int, largest: int, num_ranks: int) -> int:
    block = largest
    while block > 1 and block * (num_ranks - 1) >= num_tokens:
        block //= 2
    return block


def _owners(
    costs: list[NDArray[np.float64]], num_ranks: int, policy: Policy, scope: Scope
) -> list[tuple[int, ...]]:
    if scope is Scope.ROW:
        return [tuple(policy(cost, num_ranks).tolist()) for cost in costs]
    together = policy(np.concatenate(costs), num_ranks)
    ends = np.cumsum([len(cost) for cost in costs])
    return [tuple(owned.tolist()) for owned in np.split(together, ends[:-1])]
