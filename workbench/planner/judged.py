"""Chooses among a strategy's best few plans by a given judge, as the strategy's estimate may mislead it."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import Progress, worth_of
from workbench.planner.strategy_spec import Planner, StrategySpec

Judge = Callable[[Plan, CostModel], float]  # seconds of a step; ValueError where the plan is refused

MOST_JUDGED = 4
"""Plans that a judge prices for each estimate; strategies with two estimates bring twice as many."""


class JudgedBy(StrEnum):
    """Who chooses among the plans of a strategy's search.

    SIMULATOR: the simulator, among the best few by the strategy's own estimate.
    PLANNER: that estimate alone, as the strategies were published.
    """

    SIMULATOR = "simulator"
    PLANNER = "planner"


def judged(spec: StrategySpec, judge: Judge) -> Planner:
    """The strategy's planner with a judge: see `judged_plan`."""
    return partial(judged_plan, spec, judge)


def judged_plan(spec: StrategySpec, judge: Judge, job: Job, cost: CostModel, progress: Progress) -> Plan:
    """The plan of the strategy's shortlist that the judge finds best; refused plans are skipped.

    By the judge it is never worse than the strategy's own choice, which is first and wins among equals.

    Raises:
        ValueError: the strategy's own errors; where the judge refuses all plans, its first reason.
        TypeError: what the strategy returns is no shortlist, or an empty one.

    Complexity: `MOST_JUDGED` judgements, or twice as many, beside the search for so many plans.
    """
    best: tuple[float, Plan] | None = None
    refusal: ValueError | None = None
    for plan in _shortlisted(spec, job, cost, progress):
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


def _shortlisted(spec: StrategySpec, job: Job, cost: CostModel, progress: Progress) -> tuple[Plan, ...]:
    """The strategy's shortlist; TypeError, which names the strategy, for anything but plans."""
    returned = spec.shortlist(job, cost, progress, MOST_JUDGED)
    plans = tuple(returned) if isinstance(returned, Iterable) else ()
    if not plans or not all(isinstance(plan, Plan) for plan in plans):
        members = ", ".join(type(plan).__name__ for plan in plans)
        raise TypeError(
            f"strategy {spec.name!r}: want a tuple of at least one Plan as its shortlist, got "
            f"{type(returned).__name__} ({members}); nearest: (plan,), or a ValueError where there is none"
        )
    return plans
