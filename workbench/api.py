"""The Python interface: plan, search, simulate and run a job in a few lines.

The functions do what the commands of the same names do, without files. Simulator and runtime are imported
on demand.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from warnings import warn

from workbench.cost.profile import load_profile
from workbench.explain.warnings import unlike_layouts
from workbench.job.device import Device
from workbench.job.job import Job
from workbench.job.machines import cost_of, under
from workbench.job.matching import cost_for
from workbench.job.run_options import RunOptions
from workbench.plan.plan import Plan
from workbench.planner.judged import JudgedBy, judged
from workbench.planner.stage_counts import Progress, silent
from workbench.planner.strategy_spec import Planner, StrategySpec
from workbench.report.folder import repetition_paths
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.spec import ScheduleSpec
from workbench.search.drive import Candidate, with_schedules
from workbench.search.drive import search as search_plans
from workbench.search.objectives.objective import Objective
from workbench.strategies.registry import BY_NAME, PLANNERS, PRICED
from workbench.timing.accept import accept
from workbench.trace import Trace
from workbench.trace_json import write_trace
from workbench.whole_file import check_writable

if TYPE_CHECKING:
    from runtime.launch import RunResult

Named = TypeVar("Named")
AnySchedule = Schedule | ScheduleSpec | ScheduleKind | str
_OF_ONE_STEP = (Objective.ITERATION, Objective.THROUGHPUT, Objective.DOLLARS)
"""What a step and its price decide; the other objectives want a training or failures, which commands take."""


def plan(
    job: Job,
    strategy: str | StrategySpec = "cornstarch",
    *,
    schedule: AnySchedule | None = None,
    profile: str | Path | None = None,
    execution: str | Path | None = None,
    progress: Progress = silent,
    judge: JudgedBy | str = JudgedBy.SIMULATOR,
) -> Plan:
    """Plan a job with a strategy, with every check.

    Args:
        job: from `load_job`.
        strategy: its name in `workbench plan --strategy`, or one of your own.
        schedule: its name in `workbench plan --schedule`, or one of your own, with its default settings, or
            a `Schedule` with others; None: the job's.
        profile: name or file; None: the job's.
        execution: JSON file of the training system's rates and host times; None: the profile's.
        progress: called with (stage counts tried, their total, seconds of the best step so far).
        judge: who chooses among the strategy's best few plans: `simulator`, or `planner`, its own estimate
            alone, as published.

    Raises:
        ValueError: an unknown strategy, schedule, profile or judge, the strategy has no plan for the job, or
            the plan can deadlock or does not fit.

    Warns of layouts of the job that the strategy does not keep.
    """
    _check_kind("plan", job, Job, "load_job")
    if schedule is not None:
        job = replace(job, schedule=_schedule(schedule))
    (planner,) = _planners((strategy,), judge).values()
    result = planner(job, cost_of(job, _name(profile), _path(execution)), progress)
    accept(result)
    for line in unlike_layouts(result, job):
        warn(line, stacklevel=2)
    return result


def search(
    job: Job,
    *,
    strategies: Sequence[str | StrategySpec] = (),
    objective: Objective | str = Objective.ITERATION,
    schedules: Sequence[AnySchedule] = (),
    profile: str | Path | None = None,
    execution: str | Path | None = None,
    judge: JudgedBy | str = JudgedBy.SIMULATOR,
) -> tuple[Candidate, ...]:
    """Simulate every strategy's plan of a job; best first, strategies without a plan last, with the reason.

    Args:
        strategies: those to try, as in `plan`; empty: all that are registered.
        objective: `iteration`, `throughput` or `dollars-per-sample`.
        schedules: orders of passes to try, as in `plan`, each with every strategy; empty: the job's.
        profile, execution, judge: as in `plan`.

    Raises:
        ValueError: an unknown strategy, objective, schedule, judge or profile; two strategies or
            schedules of one name; or the objective is money and the job lacks the price of a rank.

    Warns of layouts of the job that the best plan does not keep.
    """
    from sim.predict import predict_within

    _check_kind("search", job, Job, "load_job")
    objective_kind = Objective(_one_of("objective", objective, _OF_ONE_STEP))
    chosen = [_schedule(each) for each in _several("schedules", schedules)]
    _check_unique("schedules", [f"{schedule.kind}" for schedule in chosen])
    cost = cost_of(job, _name(profile), _path(execution))
    registered = (*PLANNERS, *(PRICED if objective_kind is Objective.DOLLARS else ()))
    planners = _planners(_several("strategies", strategies) or registered, judge)
    planners_to_try = with_schedules(planners, chosen)
    candidates = search_plans(
        job,
        cost,
        planners_to_try,
        lambda candidate: predict_within(*accept(candidate), cost),
        objective=objective_kind,
    )
    best = next((candidate.plan for candidate in candidates if candidate.plan is not None), None)
    for line in () if best is None else unlike_layouts(best, job):
        warn(line, stacklevel=2)
    return candidates


def simulate(
    plan: Plan,
    *,
    profile: str | Path | Sequence[str | Path] | None = None,
    execution: str | Path | None = None,
) -> Trace:
    """Simulate one step of a plan.

    Args:
        profile: name or file, or one for each kind of device; None: the shipped ones of its devices.
        execution: as in `plan`.

    Raises:
        ValueError: an invalid plan, or one that the profile cannot price.
    """
    from sim.predict import predict_within

    _check_plan("simulate", plan)
    lowered, memory = accept(plan)
    names = () if profile is None else (profile,) if isinstance(profile, str | Path) else profile
    given = [load_profile(str(name)) for name in names]
    return predict_within(lowered, memory, under(cost_for(plan, given), _path(execution)))


def run(plan: Plan, options: RunOptions = RunOptions()) -> "RunResult":  # noqa: B008  (it is frozen)
    """Execute steps of a plan on processes of this machine, one per rank.

    Returns:
        Traces, one per timed step, losses, and other results of the run.

    Raises:
        ValueError: an invalid plan, data, weights or folders; a device that is not the CPU.
        WorldFailed: a rank died or raised; every rank has been ended, the message names the cause.
    """
    from runtime.launch import prepare, run_lowered

    _check_plan("run", plan)
    if not isinstance(options, RunOptions):
        raise TypeError(f"run: want RunOptions, got {type(options).__name__}")
    if options.device == Device.CUDA:
        raise ValueError("processes of this machine run on the CPU; on GPUs start runtime.launch by torchrun")
    lowered, _ = accept(plan)
    if options.trace is not None:
        check_writable(options.trace)
    settings, source = prepare(options, plan)
    result = run_lowered(lowered, settings, source=source)
    files = repetition_paths(options.trace, len(result.traces)) if options.trace else ()
    for path, trace in zip(files, result.traces, strict=False):
        write_trace(trace, path)
    return result


def _check_kind(function: str, value: object, kind: type, maker: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{function}: want a {kind.__name__}, as workbench.{maker} returns it, got {type(value).__name__}"
        )


_TUPLES = ("stages", "microbatches", "programs")


def _check_plan(function: str, plan: Plan) -> None:
    """TypeError for what is no plan, and for one that was changed to hold lists, which no cache can key."""
    _check_kind(function, plan, Plan, "plan")
    parts: list[tuple[str, object]] = [(name, getattr(plan, name)) for name in _TUPLES]
    parts += [(f"actions of the program of ranks {each.ranks}", each.actions) for each in plan.programs]
    for what, value in parts:
        if not isinstance(value, tuple):
            raise TypeError(f"{function}: {what} of a Plan are a tuple, got {type(value).__name__}")


def _name(profile: str | Path | None) -> str | None:
    return None if profile is None else str(profile)


def _path(file: str | Path | None) -> Path | None:
    return None if file is None else Path(file)


def _several(what: str, names: Iterable[Named]) -> tuple[Named, ...]:
    """The names, which are read more than once. A name is a sequence, too: of its letters."""
    if isinstance(names, str):
        raise TypeError(f"{what}: want a sequence of names, got {str(names)!r}; nearest: [{str(names)!r}]")
    if not isinstance(names, Iterable):
        raise TypeError(f"{what}: want a sequence, got {type(names).__name__}; nearest: a list of it")
    return tuple(names)


def _one_of(what: str, name: str, known: Collection[str]) -> str:
    """The name; ValueError, with the nearest one, where it is not known."""
    if name not in known:
        near = get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{what} {str(name)!r}: want one of {', '.join(known)}; nearest: {near}")
    return name


def _schedule(schedule: AnySchedule) -> Schedule:
    """The schedule that a name, a kind or a spec of one's own stands for."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, ScheduleSpec):
        return usual(schedule)
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule: want a name, a ScheduleSpec or a Schedule, got {type(schedule).__name__}; nearest: "
            "ScheduleSpec(name=..., summary=..., chain=...)"
        )
    return usual(ScheduleKind(_one_of("schedule", schedule, list(ScheduleKind))))


def _check_unique(what: str, names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{what}: names must be unique, {twice[0]!r} is twice")


def _planners(strategies: Sequence[str | StrategySpec], judge: JudgedBy | str) -> dict[str, Planner]:
    """Planners of strategies by name, judged by the simulator or as published."""
    from sim.predict import candidate_s

    for each in strategies:
        if not isinstance(each, str | StrategySpec):
            raise TypeError(f"strategy: want a name or a StrategySpec, got {type(each).__name__}")
    specs = [
        each if isinstance(each, StrategySpec) else BY_NAME[_one_of("strategy", each, BY_NAME)]
        for each in strategies
    ]
    _check_unique("strategies", [spec.name for spec in specs])
    if JudgedBy(_one_of("judge", judge, list(JudgedBy))) is JudgedBy.PLANNER:
        return {spec.name: spec.planner for spec in specs}
    return {spec.name: judged(spec, candidate_s) for spec in specs}
