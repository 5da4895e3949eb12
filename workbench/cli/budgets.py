"""The `--budget` of commands that plan: how it is read, and what is said of planners that it stopped."""

from collections.abc import Sequence
from math import inf
from typing import Annotated

import typer

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.budget import Budget
from workbench.planner.stage_counts import PlannerStopped
from workbench.planner.strategy_spec import Planner
from workbench.units import time_limit_s

BudgetFlag = Annotated[
    str | None, typer.Option("--budget", help="end planning after this time, such as 60s; default: none")
]


def budget_s(text: str | None, command: str) -> float:
    """Seconds for planning; infinite where no budget is given, ValueError where it is no time."""
    if text is None:
        return inf
    seconds = time_limit_s(text, "--budget")
    if not 0 < seconds < inf:
        raise ValueError(f"{command}: want --budget > 0, got {text}; nearest: 1s")
    return seconds


def stopped_text(strategies: Sequence[str]) -> str:
    """The line that names strategies which handed over a plan before their search was over."""
    return f"stopped by --budget, with the best plan so far: {', '.join(strategies)}"


def planned_within(
    budget: Budget, name: str, planner: Planner, job: Job, cost: CostModel
) -> tuple[Plan, bool]:
    """A strategy's plan, and whether the budget stopped its search.

    Raises:
        ValueError: those of the planner, or it was stopped before it had a plan.
    """
    watch = budget.watch()
    try:
        plan = planner(job, cost, watch)
    except PlannerStopped:
        raise ValueError(
            f"job {job.name!r}: --budget ended before {name} had a plan; want more time, or a plan file"
        ) from None
    return plan, watch.stopped_at is not None
