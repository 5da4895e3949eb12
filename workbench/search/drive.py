"""Plan a job with every strategy and rank the plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from workbench.cost.model import CostModel
from workbench.headline import Headline
from workbench.job.device_pools import Aim
from workbench.job.job import Job
from workbench.metrics import StepMetrics, step_metrics
from workbench.plan.plan import Plan
from workbench.planner.budget import UNLIMITED, Budget
from workbench.planner.chosen_plan import check_chosen
from workbench.planner.stage_counts import OUT_OF_TIME, PlannerStopped, Progress
from workbench.planner.strategy_spec import Planner
from workbench.schedule.choice import Schedule
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.plan_judge import Judged, PlanJudge, Report
from workbench.timing.provenance import comparable_interval
from workbench.trace import Trace
from workbench.units import S_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Headline):
    """One strategy's plan with its metrics, or the reason why there is none.

    Args:
        dollars_per_hour: price of all ranks of the plan; None where the job states no prices.
        judged: set where the search was given a judge.
        is_stopped: whether the strategy's time was over before its search; its plan is the best so far.
    """

    strategy: str
    plan: Plan | None = None
    trace: Trace | None = None
    refusal: str = ""
    dollars_per_hour: float | None = None
    judged: Judged | None = None
    is_stopped: bool = False

    @property
    def headline(self) -> str:
        """See `Headline`."""
        result = f"no plan: {self.refusal}" if self.trace is None else f"{1e3 * self.step_s:,.4g} ms a step"
        return f"<Candidate {self.strategy}: {result}>"

    @property
    def step_s(self) -> float:
        """Seconds per step, by the judge if there is one; infinite without a plan."""
        if self.trace is None:
            return float("inf")
        return self.trace.iteration_s if self.judged is None else self.judged.times.step_s

    @property
    def metrics(self) -> StepMetrics:
        """Metrics of the simulated step; ValueError for a strategy without a plan."""
        if self.trace is None:
            raise ValueError(f"strategy {self.strategy}: {self.refusal}")
        return step_metrics(self.trace)

    def ties(self, other: "Candidate") -> bool:
        """Whether both have plans whose intervals overlap, so that either may be faster on one executor."""
        if self.trace is None or other.trace is None:
            return False
        interval, other_interval = comparable_interval(self.trace), comparable_interval(other.trace)
        return interval is not None and other_interval is not None and interval.overlaps(other_interval)

    @property
    def samples_per_s_per_rank(self) -> float:
        """Throughput; 0 without a plan."""
        if self.plan is None or self.trace is None:
            return 0.0
        return len(self.plan.batch) / self.step_s / len(self.plan.ranks)

    @property
    def dollars_per_sample(self) -> float | None:
        """Price of the plan's ranks per sample; None without a plan or a price."""
        if self.plan is None or self.trace is None or self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / S_PER_HOUR * self.step_s / len(self.plan.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who hears of a search's progress, and how long its planning may take.

    Args:
        progress: called with (strategies done, number of strategies, note on the best so far and on the
            progress of the current one).
        budget: of all strategies together. Each has an equal share of what is left.
    """

    progress: Callable[[int, int, str], None] = lambda done, total, note: None
    budget: Budget = UNLIMITED


UNWATCHED = Watch()


def search(
    job: Job,
    cost: CostModel,
    planners: Mapping[str, Planner],
    predict: Callable[[Plan], Trace],
    watch: Watch = UNWATCHED,
    objective: Objective = Objective.ITERATION,
    judge: PlanJudge | None = None,
) -> tuple[Candidate, ...]:
    """Plan a job with every strategy and return the candidates, best first.

    Strategies without a plan come last, with the reason; plans that miss a limit of the judge come before
    those, the nearest miss first. Ties keep the order of `planners`.

    Each strategy searches the stage counts that the job leaves open with its own cost model of layers, and
    minimises dollars where these are the objective. All resulting plans are then judged by one simulator.

    Args:
        predict: simulates a plan after all checks; raises ValueError where it is refused.
        watch: who hears of progress, and how long planning may take.
        judge: judges the plans; None: the objective, applied to the step that `predict` returns.

    Raises:
        ValueError: the objective is money and the job lacks the price of a rank, or the objective needs a
            judge.
    """
    if judge is None and objective in (Objective.TRAINING, Objective.GOODPUT):
        raise ValueError(f"objective {objective}: want a judge that knows the training or the failures")
    job = aimed(job, objective)
    candidates: list[Candidate] = []
    progress = watch.progress
    for name, planner in planners.items():
        best = min((c for c in candidates if c.trace is not None), key=_rank_key(objective), default=None)
        note = "" if best is None else _best_so_far(best, objective)
        progress(len(candidates), len(planners), note)
        note = ", ".join(filter(None, (note, name)))
        share = watch.budget.part(1 / (len(planners) - len(candidates)))
        own = share.watch(partial(_report_progress, progress, len(candidates), len(planners), note))
        candidate = _candidate(name, job, cost, planner, predict, own)
        candidate = replace(candidate, is_stopped=own.stopped_at is not None)
        if judge is not None and candidate.plan is not None:
            judging = f"{note}: its plan is judged"
            progress(len(candidates), len(planners), judging)
            report = partial(_report_judging, progress, len(candidates), len(planners), judging)
            candidate = _with_judgement(candidate, candidate.plan, planner, judge, report)
        candidates.append(candidate)
    return tuple(sorted(candidates, key=_rank_key(objective)))


def aimed(job: Job, objective: Objective) -> Job:
    """Return the job with dollars as the aim of its stage-count search if the objective is money.

    Raises:
        ValueError: the objective is money and the job lacks the price of a rank.
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
    if objective is Objective.GOODPUT and best.judged is not None:
        return f"best so far {best.strategy}, {1 / best.judged.value:.4g} useful samples/s"
    return f"best so far {best.strategy}, {best.step_s:.3f} s"


def _report_progress(
    progress: Callable[[int, int, str], None],
    strategies: int,
    all_strategies: int,
    note: str,
    done: int,
    total: int,
    best_s: float,
) -> None:
    """Report how many of its own candidates the current strategy has tried."""
    best = f", its best estimate {best_s:.3f} s" if best_s < float("inf") else ""
    progress(strategies, all_strategies, f"{note}: {done} of {total} tried{best}")


def _report_judging(
    progress: Callable[[int, int, str], None], strategies: int, all_strategies: int, note: str, what: str
) -> None:
    """Report what of the current strategy's plan is judged."""
    progress(strategies, all_strategies, f"{note}, {what}")


def with_schedules(planners: Mapping[str, Planner], schedules: Sequence[Schedule]) -> dict[str, Planner]:
    """Pair every planner with every schedule, named `<strategy> <kind>`; without schedules, as given."""
    return _combined(planners, {f"{schedule.kind}": {"schedule": schedule} for schedule in schedules})


def with_ranks(planners: Mapping[str, Planner], counts: Sequence[int]) -> dict[str, Planner]:
    """Limit every planner to the first `count` ranks, named `<strategy> on <count>`; no counts: as given."""
    return _combined(planners, {f"on {count}": {"max_ranks": count} for count in counts})


def for_seconds_too(planners: Mapping[str, Planner]) -> dict[str, Planner]:
    """Add to every planner a variant that minimises seconds, named `<strategy>, fastest`."""
    return {
        **planners,
        **{f"{name}, fastest": Override(planner, {"aim": Aim.SECONDS}) for name, planner in planners.items()},
    }


@dataclass(frozen=True, slots=True)
class Override:
    """A planner applied to the job with some fields replaced."""

    planner: Planner
    fields: Mapping[str, Any]

    def __call__(self, job: Job, cost: CostModel, progress: Progress) -> Plan:
        return self.planner(replace(job, **self.fields), cost, progress)

    def job(self, job: Job) -> Job:
        """The job that the strategy plans."""
        own = replace(job, **self.fields)
        return self.planner.job(own) if isinstance(self.planner, Override) else own

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that it plans under; None: the job's."""
        inner = self.planner.schedule if isinstance(self.planner, Override) else None
        return inner or self.fields.get("schedule")


def _combined(
    planners: Mapping[str, Planner], changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Planner]:
    if not changes:
        return dict(planners)
    return {
        f"{name} {suffix}": Override(planner, fields)
        for name, planner in planners.items()
        for suffix, fields in changes.items()
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
    except PlannerStopped:
        return Candidate(strategy=name, refusal=OUT_OF_TIME)
    except ValueError as error:
        return Candidate(strategy=name, refusal=str(error).removeprefix(f"{name}: "))  # not named twice


def _with_judgement(
    candidate: Candidate, plan: Plan, planner: Planner, judge: PlanJudge, report: Report
) -> Candidate:
    schedule = planner.schedule if isinstance(planner, Override) else None
    try:
        return replace(candidate, judged=judge.judged(plan, schedule, report))
    except ValueError as error:
        return Candidate(strategy=candidate.strategy, refusal=str(error), is_stopped=candidate.is_stopped)


def _rank_key(objective: Objective) -> Callable[[Candidate], tuple[bool, float]]:
    def key(candidate: Candidate) -> tuple[bool, float]:
        if candidate.judged is not None:
            return bool(candidate.judged.misses), candidate.judged.value
        return candidate.trace is None, value(candidate)

    def value(candidate: Candidate) -> float:
        if candidate.trace is None:
            return float("inf")
        if objective is Objective.THROUGHPUT:
            return -candidate.samples_per_s_per_rank
        if objective is Objective.DOLLARS and candidate.dollars_per_sample is not None:
            return candidate.dollars_per_sample
        return candidate.trace.iteration_s

    return key
