"""The starts of a search: the plan of every registered strategy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import NamedTuple

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.other_layouts import with_layouts
from workbench.plan.plan import Plan
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.choice import Choice, choice_of
from workbench.search.joint.evaluate import Judge, outcome_of
from workbench.search.joint.expert_starts import expert_jobs
from workbench.search.joint.fewer_ranks import Part
from workbench.search.objectives.plan_judge import MissesLimitError
from workbench.strategies import megatron_homogeneous
from workbench.strategies.registry import BY_NAME

OPEN = ", layouts open"  # suffix of a strategy's name if it planned the job without its layouts
EXPERTS = megatron_homogeneous.NAME  # plans jobs that distribute experts over replicas
OUT_OF_TIME = "out of time"  # refusal of a strategy whose planner was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One strategy's plan with its value, or why there is none.

    Args:
        name: of the strategy, followed by `OPEN` if it planned without the job's layouts, or by the part's
            name if it planned for fewer ranks.
        choice: the plan's answers.
        batches_s: steps on the batches that it was judged on; empty: not judged by batches.
        misses_by: value of a plan that only misses a limit: less is nearer.
    """

    name: str
    plan: Plan | None = None
    choice: Choice | None = None
    value: float | None = None
    batches_s: tuple[float, ...] = ()
    refusal: str = ""
    misses_by: float | None = None


class Task(NamedTuple):
    """A strategy with a job to plan.

    Args:
        name: of the start.
        is_likely: whether the job states everything that the strategy leaves to its users.
        seconds: by the clock, after which the planner is stopped.
        part: the part of the cluster that the job is for; None: the whole.
    """

    name: str
    planner: Planner
    job: Job
    is_likely: bool = False
    seconds: float = inf
    clock: Callable[[], float] = monotonic
    part: Part | None = None


class _OutOfTime(Exception):  # noqa: N818  (no error: the planner is told to stop)
    """A planner was stopped."""


def start_tasks(job: Job, planners: Mapping[str, Planner], parts: Sequence[Part] = ()) -> Iterator[Task]:
    """Every strategy on the job as it is, then those that choose degrees on the job without its layouts.

    Then Megatron homogeneous with experts distributed over replicas, where the model has any. Last, those
    that choose degrees again, on every part of the cluster.
    """
    searching = {name for name in planners if name in BY_NAME and BY_NAME[name].searches_layouts}
    for name, planner in planners.items():
        yield Task(name, planner, job, is_likely=bool(job.layouts) or name in searching)
    if job.layouts:
        for name, planner in planners.items():
            if name in searching:
                yield Task(name + OPEN, planner, with_layouts(job, ()))
    if EXPERTS in planners:
        for words, expert_job in expert_jobs(job):
            yield Task(f"{EXPERTS}, {words}", planners[EXPERTS], expert_job, is_likely=True)
    for part in parts:
        for name, planner in planners.items():
            if name in searching:
                yield Task(f"{name} {part.name}", planner, part.job, part=part)


def start_of(task: Task, cost: CostModel, judge: Judge) -> Start:
    """Run one strategy and judge its plan; no plan if the planner exceeds the task's time.

    A planner is stopped when it reports progress, between two of its own candidates.
    """
    end_s = task.clock() + task.seconds

    def check_time(done: int, total: int, best_s: float) -> None:
        if task.clock() > end_s:
            raise _OutOfTime

    try:
        plan, job = task.planner(task.job, cost, check_time), task.job
        if task.part is not None:
            plan, job = task.part.moved(plan), task.part.whole
        outcome = outcome_of(plan, judge)
    except MissesLimitError as error:
        return Start(name=task.name, refusal=str(error), misses_by=error.value)
    except ValueError as error:
        return Start(name=task.name, refusal=str(error))
    except _OutOfTime:
        return Start(name=task.name, refusal=OUT_OF_TIME)
    return Start(
        name=task.name,
        plan=plan,
        choice=choice_of(job, plan, cost),
        value=outcome.value,
        batches_s=outcome.batches_s,
    )
