"""Peak bytes of a row's fullest GPU, out of the lines of the plan's memory account."""

from math import ceil

from workbench.llm_table.llm_row import LlmRow, Number, Optimizer, Recomputed
from workbench.llm_table.row_plan import MODULE
from workbench.memory.account import static_holders
from workbench.memory.accounts import Accounts
from workbench.memory.entries import Lines, rank_lines
from workbench.plan.lowered import Lowered


def row_bytes(alone: Lowered, row: LlmRow) -> int:
    """Most bytes any rank holds: `activation_bytes` on top of `held_bytes`.

    Scores that are computed again are there for one layer at a time.

    Complexity: O(stages x microbatches); ranks of a stage hold the same.
    """
    activations = activation_bytes(alone)
    again = scores_bytes(row) if row.recompute is Recomputed.SELECTIVE else 0
    return again + max(held_bytes(alone, row, rank) + size for rank, size in activations.items())


def scores_bytes(row: LlmRow) -> int:
    """Of one layer's stored scores on one rank: softmax, dropout mask, result (Korthikanti et al. 2022)."""
    element = 4 if row.precision is Number.FP32 else 2
    pairs = row.micro_batch * row.sequence**2 // row.cp
    return (2 * element + 1) * pairs * row.heads // row.tp


def held_bytes(alone: Lowered, row: LlmRow, rank: int) -> int:
    """Weights, gradients and optimizer state, from the first step to the last.

    Gradients have a buffer of their own that is never given back (Shoeybi et al. 2019,
    "Megatron-LM"). A distributed optimizer leaves each replica its part of the state.
    """
    holders = static_holders(alone.plan, rank)
    optimizer = holders.pop(f"optimizer of {MODULE}", 0)
    parts = row.dp * row.cp if row.optimizer is Optimizer.DISTRIBUTED else 1
    return sum(holders.values()) + ceil(optimizer / parts)


def activation_bytes(alone: Lowered) -> dict[int, int]:
    """First rank of every place in the pipeline -> most bytes beside what `held_bytes` counts."""
    leaders = dict.fromkeys(stage.flat_ranks[0] for stage in alone.plan.stages)
    accounts = Accounts(alone, leaders)
    return {rank: _most(rank_lines(accounts, rank)) for rank in leaders}


def _most(lines: Lines) -> int:
    """Walks the rank's program, leaving gradients out.

    The account lets a stage's first backward make them and the pass behind it take them.
    """
    held = most = 0
    for place, (acquired, released) in enumerate(zip(lines.acquired, lines.released, strict=True)):
        taken = acquired - sum(lines.gradients.get(place, {}).values())
        soon = sum(lines.gradients.get(place + 1, {}).values())
        most = max(most, held + (max(0, taken - soon) if soon else taken))
        held += taken - released
    return most
