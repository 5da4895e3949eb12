"""Cornstarch: every module on ranks of its own, stages balanced by forward plus backward.

Source: Cornstarch v1 section 4.1 (modality parallelism) and 4.2, ICML section 3.1 and 4.1
(frozen-status-aware partitioning, Eq. 1-6); token distribution of v1 section 4.3.2.
"""

from dataclasses import replace

from workbench.balance.tokens.exchange import longest_first_exchanged
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.check import check
from workbench.plan.plan import Plan
from workbench.plan.token_shards import token_shards
from workbench.planner.assembly import disjoint_stages, draft_plan, layout_of
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.planner_cost import FROZEN_AWARE, FROZEN_UNAWARE, Belief
from workbench.planner.stage_counts import Progress, fastest_counts, silent
from workbench.planner.strategy_spec import StrategySpec


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Frozen-aware: T_l = F_l + B_l, where B_l counts the gradients that really run.

    Stage counts that the job leaves open are searched under its rank budget.

    Raises:
        ValueError: more stages than layers, a batch that does not divide, too few ranks.
    """
    return _plan(job, cost, "cornstarch", FROZEN_AWARE, progress)


def plan_frozen_unaware(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The same with stages balanced, and counted, as if every backward took twice its forward.

    Source: Cornstarch v1 section 6.1 (baseline) and 6.4.
    """
    return _plan(job, cost, "cornstarch-frozen-unaware", FROZEN_UNAWARE, progress)


def _plan(job: Job, cost: CostModel, name: str, belief: Belief, progress: Progress) -> Plan:
    draft = draft_plan(job, name)
    layers_s = believed_layers_s(job, draft, cost, belief.layer_s)
    entry_of = {module: module for module in layers_s}
    ranks_per_stage = {module: layout_of(job, module).tp * layout_of(job, module).cp for module in layers_s}
    candidates = CutCandidates(job, draft, cost, belief, layers_s, entry_of, disjoint_stages)
    return with_balanced_tokens(fastest_counts(job, ranks_per_stage, candidates, progress))


def with_balanced_tokens(plan: Plan) -> Plan:
    """Tokens of context-parallel modules distributed by attention work, longest block first.

    Source: Cornstarch v1 section 4.3.2, ICML section 3.2.1. The baselines keep zigzag.
    Differs: exchanges after the longest-first pass make the ranks even, see `tokens_exchange`.
    """
    shards = [
        shard
        for module in plan.model.modules
        for shard in token_shards(plan, module.name, longest_first_exchanged)
    ]
    if not shards:
        return plan
    sharded = replace(plan, token_shards=tuple(shards))
    check(sharded)
    return sharded


SPEC = StrategySpec(
    name="cornstarch",
    planner=plan,
    summary="encoders on ranks of their own; stages balanced by forward plus the backward that really runs",
)

SPEC_FROZEN_UNAWARE = StrategySpec(
    name="cornstarch-frozen-unaware",
    planner=plan_frozen_unaware,
    summary="as cornstarch, balanced by forward alone, as if all were trainable",
)
