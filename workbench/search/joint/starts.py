"""The starts of a search: the plan of every registered strategy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import NamedTuple

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.other_layouts import with_layouts
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import OUT_OF_TIME, PlannerStopped, StopWatch
from workbench.planner.strategy_spec import Planner
from workbench.search.drive import Override
from workbench.search.joint.choice import Choice, choice_of
from workbench.search.joint.evaluate import Judge, outcome_of
from workbench.search.joint.expert_starts import expert_jobs
from workbench.search.joint.fewer_ranks import Part
from workbench.search.objectives.plan_judge import MissesLimitError
from workbench.strategies import megatron_homogeneous
from workbench.strategies.registry import BY_NAME

OPEN = ", layouts open"  # suffix of a strategy's name if it planned the job without its layouts
EXPERTS = megatron_homogeneous.NAME  # plans jobs that distribute experts over replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One strategy's plan with its value, or why there is none.

    Args:
        name: of the strategy, followed by `OPEN` if it planned without the job's layouts, or by the part's
            name if it planned for fewer ranks.
        choice: the plan's answers.
        batches_s: steps on the batches that it was judged on; empty: not judged by batches.
        effort: of judging the plan, as in `Outcome`.
        misses_by: value of a plan that only misses a limit: less is nearer.
        stopped_at: number of reports after which the planner was stopped, with its best plan so far; None: it
            finished.
    """

    name: str
    plan: Plan | None = None
    choice: Choice | None = None
    value: float | None = None
    batches_s: tuple[float, ...] = ()
    effort: float = 1.0
    refusal: str = ""
    misses_by: float | None = None
    stopped_at: int | None = None

    @property
    def is_late(self) -> bool:
        """Whether its planner was stopped, with or without a plan."""
        return self.stopped_at is not None or self.refusal == OUT_OF_TIME


class Task(NamedTuple):
    """A strategy with a job to plan.

    Args:
        name: of the start.
        chooses: whether the strategy chooses the degrees of parallelism itself.
        seconds: by the clock, after which the planner is stopped.
        reports: of progress, after which the planner is stopped.
        part: the part of the cluster that the job is for; None: the whole.
        effort: of planning, as in `OwnSpace`.
    """

    name: str
    planner: Planner
    job: Job
    chooses: bool = False
    seconds: float = inf
    reports: float = inf
    clock: Callable[[], float] = monotonic
    part: Part | None = None
    effort: float = 1.0


def start_tasks(job: Job, planners: Mapping[str, Planner], parts: Sequence[Part] = ()) -> Iterator[Task]:
    """Every strategy on the job as it is, then those that choose degrees on the job without its layouts.

    Then Megatron homogeneous with experts distributed over replicas, where the model has any. Last, those
    that choose degrees again, on every part of the cluster.
    """
    searching = {name for name in planners if name in BY_NAME and BY_NAME[name].searches_layouts}
    efforts = {name: BY_NAME[name].own_space.effort if name in BY_NAME else 1.0 for name in planners}
    for name, planner in planners.items():
        yield Task(name, planner, job, chooses=name in searching, effort=efforts[name])
    if job.layouts:
        for name, planner in planners.items():
            if name in searching:
                opened = with_layouts(job, ())
                yield Task(name + OPEN, planner, opened, chooses=True, effort=efforts[name])
    if EXPERTS in planners:
        for words, expert_job in expert_jobs(job):
            name = f"{EXPERTS}, {words}"
            yield Task(name, planners[EXPERTS], expert_job, chooses=True, effort=efforts[EXPERTS])
    for part in parts:
        for name, planner in planners.items():
            if name in searching:
                yield Task(f"{name} {part.name}", planner, part.job, part=part, effort=efforts[name])


def start_of(task: Task, cost: CostModel, judge: Judge) -> Start:
    """Run one strategy and judge its plan; at the end of the task's time, the best plan that it has.

    A planner is stopped when it reports progress, between two of its own candidates.
    """
    watch = StopWatch(task.clock, end_s=task.clock() + task.seconds, most=task.reports)
    try:
        plan, job = task.planner(task.job, cost, watch), task.job
        if task.part is not None:
            plan, job = task.part.moved(plan), task.part.whole
        outcome = outcome_of(plan, judge)
    except MissesLimitError as error:
        return Start(name=task.name, refusal=str(error), misses_by=error.value, stopped_at=watch.stopped_at)
    except ValueError as error:
        return Start(name=task.name, refusal=str(error), stopped_at=watch.stopped_at)
    except PlannerStopped:
        return Start(name=task.name, refusal=OUT_OF_TIME, stopped_at=watch.stopped_at)
    schedule = task.planner.schedule if isinstance(task.planner, Override) else None
    if schedule is not None:
        job = replace(job, schedule=schedule)
    return Start(
        name=task.name,
        plan=plan,
        choice=choice_of(job, plan, cost),
        value=outcome.value,
        batches_s=outcome.batches_s,
        effort=outcome.effort,
        stopped_at=watch.stopped_at,
    )
