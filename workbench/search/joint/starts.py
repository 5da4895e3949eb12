"""What a search starts from: the plan of every registered strategy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import silent
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.choice import Choice, choice_of
from workbench.search.joint.evaluate import Judge
from workbench.strategies.registry import BY_NAME

OPEN = ", layouts open"  # behind the name of a strategy that planned the job without its layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One strategy's plan with its value, or why there is none.

    Args:
        name: of the strategy; of a plan without the job's layouts with `OPEN` behind it.
        choice: the plan's answers.
    """

    name: str
    plan: Plan | None = None
    choice: Choice | None = None
    value: float | None = None
    refusal: str = ""


Task = tuple[str, Planner, Job]


def start_tasks(job: Job, planners: Mapping[str, Planner]) -> Iterator[Task]:
    """Every strategy on the job as it is, then those that choose degrees on the job without its layouts."""
    for name, planner in planners.items():
        yield name, planner, job
    if job.layouts:
        for name, planner in planners.items():
            if name in BY_NAME and BY_NAME[name].searches_layouts:
                yield name + OPEN, planner, replace(job, layouts=())


def start_of(task: Task, cost: CostModel, judge: Judge) -> Start:
    """The plan of one strategy, judged."""
    name, planner, job = task
    try:
        plan = planner(job, cost, silent)
        value = judge.value(plan)
    except ValueError as error:
        return Start(name=name, refusal=str(error))
    return Start(name=name, plan=plan, choice=choice_of(job, plan, cost), value=value)
