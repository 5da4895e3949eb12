"""A strategy's best few plans held against a judge that is passed in, as its own estimate may mislead it."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import Progress, worth_of
from workbench.planner.strategy_spec import Planner, StrategySpec

Judge = Callable[[Plan, CostModel], float]  # seconds of a step; ValueError where the plan is refused

MOST_JUDGED = 4
"""Plans of each estimate that a judge is asked about; strategies with two estimates bring twice as many."""


class JudgedBy(StrEnum):
    """Who has the last word on what a strategy leaves to a search.

    SIMULATOR: the simulator, among the best few by the strategy's own estimate.
    PLANNER: that estimate alone, as the strategies were published.
    """

    SIMULATOR = "simulator"
    PLANNER = "planner"


def judged(spec: StrategySpec, judge: Judge) -> Planner:
    """The strategy's planner with a judge: `judged_plan`."""
    return partial(judged_plan, spec, judge)


def judged_plan(spec: StrategySpec, judge: Judge, job: Job, cost: CostModel, progress: Progress) -> Plan:
    """The best by the judge of a strategy's shortlist; what the judge refuses is passed over.

    It is never worse by the judge than the strategy's own choice, which stands first, and stays among equals.

    Raises:
        ValueError: what the strategy refuses; where the judge refuses all plans, its first reason.

    Complexity: `MOST_JUDGED` judgements, or twice as many, beside the search for so many plans.
    """
    best: tuple[float, Plan] | None = None
    refusal: ValueError | None = None
    for plan in spec.shortlist(job, cost, progress, MOST_JUDGED):
        try:
            worth = worth_of(job, judge(plan, cost), plan.ranks)
        except ValueError as error:
            refusal = refusal or error
            continue
        if best is None or worth < best[0]:
            best = worth, plan
    if best is None:
        assert refusal is not None, "a shortlist has a plan"
        raise refusal
    return best[1]
