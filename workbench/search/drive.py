"""Tries every strategy on a job and ranks the plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from workbench.cost.model import CostModel
from workbench.job.device_pools import Aim
from workbench.job.job import Job
from workbench.metrics import StepMetrics, step_metrics
from workbench.plan.plan import Plan
from workbench.planner.chosen_plan import check_chosen
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import Planner
from workbench.schedule.choice import Schedule
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.plan_judge import Judged, PlanJudge
from workbench.timing.provenance import interval_of
from workbench.trace import Trace
from workbench.units import S_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What became of one strategy: a plan with its figures, or the reason why there is none.

    `dollars_per_hour` is of the plan's ranks together; None where the job does not say it. `judged` is
    there where the search had a judge.
    """

    strategy: str
    plan: Plan | None = None
    trace: Trace | None = None
    refusal: str = ""
    dollars_per_hour: float | None = None
    judged: Judged | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step, by the judge where there is one; infinite without a plan."""
        if self.trace is None:
            return float("inf")
        return self.trace.iteration_s if self.judged is None else self.judged.times.step_s

    @property
    def metrics(self) -> StepMetrics:
        """ValueError for a strategy without a plan."""
        if self.trace is None:
            raise ValueError(f"strategy {self.strategy}: {self.refusal}")
        return step_metrics(self.trace)

    def ties(self, other: "Candidate") -> bool:
        """Whether both have a plan and intervals that overlap: either may be the faster one."""
        if self.trace is None or other.trace is None:
            return False
        own, others = interval_of(self.trace), interval_of(other.trace)
        return own is not None and others is not None and own.overlaps(others)

    @property
    def samples_per_s_per_rank(self) -> float:
        """Throughput; 0 without a plan."""
        if self.plan is None or self.trace is None:
            return 0.0
        return len(self.plan.batch) / self.step_s / len(self.plan.ranks)

    @property
    def dollars_per_sample(self) -> float | None:
        """Of the plan's ranks for a step; None without a plan or a price."""
        if self.plan is None or self.trace is None or self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / S_PER_HOUR * self.step_s / len(self.plan.batch)


def search(
    job: Job,
    cost: CostModel,
    planners: Mapping[str, Planner],
    predict: Callable[[Plan], Trace],
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    objective: Objective = Objective.ITERATION,
    judge: PlanJudge | None = None,
) -> tuple[Candidate, ...]:
    """Every strategy's plan, best first; strategies without a plan stand last, with the reason.

    Plans that miss a judge's limit stand before those, the nearest first.

    Each strategy searches the stage counts that the job leaves open by its own costs of layers, for dollars
    where these are the objective; the plans are then judged by one simulator. Ties keep the order of
    `planners`.

    Args:
        predict: simulates a plan after every check; ValueError where it is refused.
        progress: called with (strategies done, strategies, what is best so far and how far the next one is).
        judge: of the plans; None: the objective, of the step that `predict` gives.

    Raises:
        ValueError: money is the objective and the job does not say what every rank costs; an objective that
            wants a judge.
    """
    if judge is None and objective in (Objective.TRAINING, Objective.GOODPUT):
        raise ValueError(f"objective {objective}: want a judge that knows the training or the failures")
    job = aimed(job, objective)
    found: list[Candidate] = []
    for name, planner in planners.items():
        best = min((c for c in found if c.trace is not None), key=_key(objective), default=None)
        note = "" if best is None else _best_so_far(best, objective)
        progress(len(found), len(planners), note)
        inside = partial(_inside, progress, len(found), len(planners), ", ".join(filter(None, (note, name))))
        found.append(_judged(_candidate(name, job, cost, planner, predict, inside), planner, judge))
    return tuple(sorted(found, key=_key(objective)))


def aimed(job: Job, objective: Objective) -> Job:
    """The job whose stage counts strategies search for dollars where these are the objective.

    Raises:
        ValueError: money is the objective and the job does not say what every rank costs.
    """
    if not objective.is_money:
        return job
    if not job.has_prices:
        raise ValueError(
            f"job {job.name!r}: {objective} wants cluster.dollars_per_gpu_hour, or cluster.pools, each with "
            "dollars_per_hour"
        )
    return replace(job, aim=Aim.DOLLARS)


def _best_so_far(best: Candidate, objective: Objective) -> str:
    if objective.is_money and best.dollars_per_sample is not None:
        return f"best so far {best.strategy}, {best.dollars_per_sample:.3g} dollars a sample"
    return f"best so far {best.strategy}, {best.step_s:.3f} s"


def _inside(
    progress: Callable[[int, int, str], None],
    strategies: int,
    all_strategies: int,
    note: str,
    done: int,
    total: int,
    best_s: float,
) -> None:
    """Tell how far one strategy is with its own candidates."""
    best = f" at {best_s:.3f} s" if best_s < float("inf") else ""
    progress(strategies, all_strategies, f"{note}: {done} of {total}{best}")


def with_schedules(planners: Mapping[str, Planner], schedules: Sequence[Schedule]) -> dict[str, Planner]:
    """Every planner with every schedule in place of the job's, named `<strategy> <kind>`; none: as given."""
    return _each_with(planners, {f"{schedule.kind}": {"schedule": schedule} for schedule in schedules})


def with_ranks(planners: Mapping[str, Planner], counts: Sequence[int]) -> dict[str, Planner]:
    """Every planner on the first ranks of the job, so many, named `<strategy> on <count>`; none: as given."""
    return _each_with(planners, {f"on {count}": {"max_ranks": count} for count in counts})


def for_seconds_too(planners: Mapping[str, Planner]) -> dict[str, Planner]:
    """Every planner as it is, and looking for the shortest step, named `<strategy>, fastest`."""
    return {
        **planners,
        **{f"{name}, fastest": With(each, {"aim": Aim.SECONDS}) for name, each in planners.items()},
    }


@dataclass(frozen=True, slots=True)
class With:
    """A planner of a job that is another in some fields."""

    planner: Planner
    fields: Mapping[str, Any]

    def __call__(self, job: Job, cost: CostModel, progress: Progress) -> Plan:
        return self.planner(replace(job, **self.fields), cost, progress)

    @property
    def schedule(self) -> Schedule | None:
        """That it plans under; None: the job's."""
        inner = self.planner.schedule if isinstance(self.planner, With) else None
        return inner or self.fields.get("schedule")


def _each_with(
    planners: Mapping[str, Planner], changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Planner]:
    if not changes:
        return dict(planners)
    return {
        f"{name} {word}": With(planner, fields)
        for name, planner in planners.items()
        for word, fields in changes.items()
    }


def _candidate(
    name: str,
    job: Job,
    cost: CostModel,
    planner: Planner,
    predict: Callable[[Plan], Trace],
    progress: Progress,
) -> Candidate:
    try:
        plan = planner(job, cost, progress)
        check_chosen(job, plan)
        rate = job.dollars_per_hour(plan.ranks)
        return Candidate(strategy=name, plan=plan, trace=predict(plan), dollars_per_hour=rate)
    except ValueError as error:
        return Candidate(strategy=name, refusal=str(error).removeprefix(f"{name}: "))  # said once


def _judged(candidate: Candidate, planner: Planner, judge: PlanJudge | None) -> Candidate:
    if judge is None or candidate.plan is None:
        return candidate
    try:
        return replace(
            candidate,
            judged=judge.judged(candidate.plan, planner.schedule if isinstance(planner, With) else None),
        )
    except ValueError as error:
        return Candidate(strategy=candidate.strategy, refusal=str(error))


def _key(objective: Objective) -> Callable[[Candidate], tuple[bool, float]]:
    def key(candidate: Candidate) -> tuple[bool, float]:
        if candidate.judged is not None:
            return bool(candidate.judged.misses), candidate.judged.value
        return candidate.trace is None, figure(candidate)

    def figure(candidate: Candidate) -> float:
        if candidate.trace is None:
            return float("inf")
        if objective is Objective.THROUGHPUT:
            return -candidate.samples_per_s_per_rank
        if objective is Objective.DOLLARS and candidate.dollars_per_sample is not None:
            return candidate.dollars_per_sample
        return candidate.trace.iteration_s

    return key
