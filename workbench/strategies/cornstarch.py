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
from workbench.planner.assembly import disjoint_stages, draft_plan
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.planner_cost import FROZEN_AWARE, FROZEN_UNAWARE, PlannerCost
from workbench.planner.stage_counts import Progress, best_counts, silent
from workbench.planner.strategy_spec import Chooser, First, OwnSpace, StrategySpec

NAME, UNAWARE_NAME = "cornstarch", "cornstarch-frozen-unaware"


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Frozen-aware: T_l = F_l + B_l, where B_l counts only the gradients that are computed.

    Stage counts that the job leaves open are searched within its rank budget.

    Raises:
        ValueError: more stages than layers, a batch that does not divide, too few ranks.
    """
    return _best(job, cost, NAME, FROZEN_AWARE, progress, 1)[0]


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The best plans by `plan`'s estimate, then by `plan_frozen_unaware`'s, each with its own stages.

    Neither estimate captures everything that determines a step: stages balanced by forward time alone are
    sometimes faster. A judge that does may choose them, so that the result is never worse than
    `cornstarch-frozen-unaware`.

    Raises:
        ValueError: neither has a plan; the reason is that of `plan`.
    """
    plans: list[Plan] = []
    refusal: ValueError | None = None
    for planner_cost in (FROZEN_AWARE, FROZEN_UNAWARE):
        try:
            plans += (
                plan for plan in _best(job, cost, NAME, planner_cost, progress, most) if plan not in plans
            )
        except ValueError as error:
            refusal = refusal or error
    if not plans:
        assert refusal is not None
        raise refusal
    return tuple(plans)


def shortlist_frozen_unaware(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """As `shortlist`, with stages balanced and counted as if every backward took twice its forward.

    Source: Cornstarch v1 section 6.1 (baseline) and 6.4.
    """
    return _best(job, cost, UNAWARE_NAME, FROZEN_UNAWARE, progress, most)


plan_frozen_unaware = First(shortlist_frozen_unaware)


def _best(
    job: Job, cost: CostModel, name: str, planner_cost: PlannerCost, progress: Progress, most: int
) -> tuple[Plan, ...]:
    candidates = CutCandidates(job, draft_plan(job, name), cost, planner_cost, disjoint_stages)
    return tuple(with_balanced_tokens(plan) for plan in best_counts(candidates, progress, most))


def with_balanced_tokens(plan: Plan) -> Plan:
    """Distribute tokens of context-parallel modules by attention work, longest block first.

    Source: Cornstarch v1 section 4.3.2, ICML section 3.2.1. The baselines keep zigzag.
    Differs: exchanges after the longest-first pass make the ranks even, see `balance.tokens.exchange`.
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
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    summary="Cornstarch: encoders on separate ranks; stages balanced by forward plus needed backward",
    own_space=OwnSpace(degrees=Chooser.EACH, where="Cornstarch v1, sections 3.2, 4.1 and 5.2", effort=3.0),
    stands_for_placing=True,
)

SPEC_FROZEN_UNAWARE = StrategySpec(
    name=UNAWARE_NAME,
    planner=plan_frozen_unaware,
    shortlist=shortlist_frozen_unaware,
    summary="as cornstarch, but balanced by forward alone, as if everything were trainable",
    own_space=OwnSpace(degrees=Chooser.EACH, where="Cornstarch v1, sections 6.1 and 6.4"),
)
