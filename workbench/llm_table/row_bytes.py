"""Peak bytes of a row's fullest GPU, from the lines of the plan's memory account."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from workbench.float_sum import float_sum
from workbench.llm_table.llm_row import GradientNumber, LlmRow, Number, Scores, YesNo
from workbench.llm_table.row_memory import as_kept
from workbench.memory.accounts import Accounts
from workbench.memory.entries import Lines, gradient_lines, rank_lines
from workbench.memory.layer import state_bytes_of
from workbench.memory.stage import GRADIENTS, StateKind, state_of
from workbench.model.block_modules import BlockModule
from workbench.model.experts import is_of_expert
from workbench.plan.expert_groups import expert_elements, has_expert_parallelism, held_elements
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage

SHARDED_FROM = {"optimizer": 1, GRADIENTS: 2, "parameters": 3}  # ZeRO stage
UNITS_AT_ONCE = 2  # gathered units: the one in use and the prefetched one


def row_bytes(alone: Lowered, row: LlmRow) -> int:
    """Peak bytes of any rank: `activation_bytes` plus `held_bytes`.

    Recomputed scores exist for one layer at a time.

    Complexity: O(stages x microbatches); ranks of a stage hold the same.
    """
    activations = activation_bytes(replace(alone, plan=as_kept(alone.plan, row)))
    recomputes_scores = row.attention is Scores.STORED and BlockModule.CORE_ATTN in row.computed_again
    scores = scores_bytes(row) if recomputes_scores else 0
    return scores + max(held_bytes(alone, row, rank) + size for rank, size in activations.items())


def scores_bytes(row: LlmRow) -> int:
    """Bytes of one layer's stored scores on a rank: softmax, dropout mask and result (Korthikanti et al.
    2022).
    """
    element = 4 if row.precision is Number.FP32 else 2
    pairs = row.micro_batch * row.sequence**2 // row.cp
    bytes_per_score = 2 * element + 1 if row.dropout is YesNo.YES else element
    return bytes_per_score * pairs * row.heads // row.tp


def held_bytes(alone: Lowered, row: LlmRow, rank: int) -> int:
    """Bytes of weights, gradients and optimizer state, constant over all steps.

    Gradients have a buffer of their own that is never freed (Shoeybi et al. 2019, "Megatron-LM"), in the
    format of their reduction; shards of FSDP are as wide as its float32 weights. Sharded state leaves each
    rank of a group its part, of distributed experts each rank that holds the same ones, plus the gathered
    units of weights.
    """
    plan = _unsharded(alone.plan)
    of_others, of_experts = Counter[str](), _expert_bytes(plan, rank)
    for _, kind, num_bytes in state_of(plan, rank):
        of_others[kind.part] += num_bytes
    of_others.subtract(of_experts)
    own_bytes = _own_bytes(of_others, row.sharing_ranks, row) + _own_bytes(of_experts, row.expert_shards, row)
    return own_bytes + (_gathered_bytes(plan, row, rank) if row.gathers_weights else 0)


def _own_bytes(bytes_by_part: Mapping[str, int], num_shards: int, row: LlmRow) -> int:
    """Bytes that a rank keeps of unsharded state, of which the sharded parts are in that many shards."""
    halves_gradients = (
        row.grad_precision is GradientNumber.BF16 and row.precision is not Number.FP32 and row.zero_stage < 3
    )  # the plan's are float32
    own_bytes = 0
    for part, num_bytes in bytes_by_part.items():
        kept = num_bytes // 2 if part == GRADIENTS and halves_gradients else num_bytes
        own_bytes += ceil(kept / (num_shards if row.zero_stage >= SHARDED_FROM[part] else 1))
    return own_bytes


def _expert_bytes(plan: Plan, rank: int) -> Counter[str]:
    """Bytes of the unsharded state of distributed experts on a rank, by part."""
    size, parts = state_bytes_of(plan.settings), Counter[str]()
    for stage in plan.stages_on[rank]:
        for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
            num_elements = expert_elements(layer, stage) if has_expert_parallelism(stage, layer) else 0
            parts["parameters"] += num_elements * size.weight
            if layer.trainable:
                parts[GRADIENTS] += num_elements * size.gradient
                parts["optimizer"] += num_elements * size.optimizer
    return parts


def _unsharded(plan: Plan) -> Plan:
    modules = tuple(each.sharded(Sharding.NONE) for each in plan.settings.modules)
    return replace(plan, settings=replace(plan.settings, modules=modules))


def _gathered_bytes(plan: Plan, row: LlmRow, rank: int) -> int:
    """Bytes of the largest units: their weights, and gradients of one, which are whole until they are
    scattered. Experts with one holder in a copy are not gathered.
    """
    has_experts = row.ep == 1 or row.expert_shards > 1
    sizes = [_elements(plan, stage, has_experts=has_experts) for stage in plan.stages_on[rank]]
    weights = UNITS_AT_ONCE * plan.settings.precision.num_bytes
    return round(max(sizes) * (weights + plan.settings.gradient_bytes))


def _elements(plan: Plan, stage: Stage, *, has_experts: bool) -> float:
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    parameters = (each for layer in layers for each in layer.parameters())
    return float_sum(
        held_elements(each, stage) for each in parameters if has_experts or not is_of_expert(each)
    )


def activation_bytes(alone: Lowered) -> dict[int, int]:
    """First rank of every pipeline stage -> peak bytes beyond those of `held_bytes`."""
    leaders = dict.fromkeys(stage.flat_ranks[0] for stage in alone.plan.stages)
    accounts = Accounts(alone, leaders)
    return {
        rank: _peak_without_gradients(lines, gradient_lines(accounts, rank))
        for rank, lines in rank_lines(accounts).items()
    }


def _peak_without_gradients(lines: Lines, gradients: Mapping[int, Mapping[StateKind, int]]) -> int:
    """Peak over the rank's program without gradients.

    The account lets a stage's first backward allocate them and the following pass take them over.
    """
    current = most = 0
    for index, (acquired, released) in enumerate(zip(lines.acquired, lines.released, strict=True)):
        allocated = acquired - sum(gradients.get(index, {}).values())
        soon_taken = sum(gradients.get(index + 1, {}).values())
        most = max(most, current + (max(0, allocated - soon_taken) if soon_taken else allocated))
        current += allocated - released
    return most
