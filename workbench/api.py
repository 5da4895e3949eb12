"""What the package itself offers, as functions: plan, search, simulate and run a job in a few lines.

They do what the commands of these names do, without their files. Simulator and runtime are imported when
they are needed.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cost.profile import load_profile
from workbench.job.device import Device
from workbench.job.job import Job
from workbench.job.machines import cost_of, under
from workbench.job.matching import cost_for
from workbench.job.run_options import RunOptions
from workbench.plan.plan import Plan
from workbench.planner.judged import JudgedBy, judged
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import Planner, StrategySpec
from workbench.report.folder import repetition_paths
from workbench.schedule.choice import ScheduleKind, usual
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


def _in_silence(done: int, total: int, best: object) -> None:
    """Progress that nobody asked for."""


def plan(
    job: Job,
    strategy: str = "cornstarch",
    *,
    profile: str | Path | None = None,
    execution: Path | None = None,
    progress: Progress = _in_silence,
    judge: JudgedBy | str = JudgedBy.SIMULATOR,
) -> Plan:
    """The plan that a strategy makes of a job, after every check.

    Args:
        job: of `load_job`.
        strategy: by its name in `workbench plan --strategy`.
        profile: name or file; None: the job's.
        execution: JSON file of the training system's rates and host times; None: the profile's.
        progress: called with (stage counts tried, of how many, seconds of the best step so far).
        judge: who decides among the strategy's best few plans: `simulator`, or `planner`, its own estimate
            alone, as it was published.

    Raises:
        ValueError: there is no such strategy or profile, the strategy has no plan of the job, or the plan
            can deadlock or does not fit.
    """
    planner = _planners((strategy,), judge)[strategy]
    made = planner(job, cost_of(job, _name(profile), execution), progress)
    accept(made)
    return made


def search(
    job: Job,
    *,
    objective: Objective | str = Objective.ITERATION,
    schedules: Sequence[ScheduleKind] = (),
    profile: str | Path | None = None,
    execution: Path | None = None,
    judge: JudgedBy | str = JudgedBy.SIMULATOR,
) -> tuple[Candidate, ...]:
    """Every strategy's plan of a job, simulated, the best first; those without one last, with the reason.

    Args:
        objective: what is best: `iteration`, `throughput` or `dollars-per-sample`.
        schedules: orders of passes to try, each with every strategy; none: the job's.
        profile, execution, judge: as in `plan`.

    Raises:
        ValueError: there is no such objective, schedule or profile; money is the objective and the job does
            not say what every rank costs.
    """
    from sim.predict import predict_within

    cost, wanted = cost_of(job, _name(profile), execution), Objective(objective)
    planners = _planners((*PLANNERS, *(PRICED if wanted is Objective.DOLLARS else ())), judge)
    tried = with_schedules(planners, [usual(kind) for kind in schedules])
    return search_plans(job, cost, tried, lambda made: predict_within(*accept(made), cost), objective=wanted)


def simulate(plan: Plan, *, profile: str | Path | None = None, execution: Path | None = None) -> Trace:
    """One step of a plan as the simulator foresees it.

    Args:
        profile: name or file; None: the shipped one of the cluster's device.
        execution: as in `plan`.

    Raises:
        ValueError: a plan that is refused, or that the profile cannot price.
    """
    from sim.predict import predict_within

    lowered, memory = accept(plan)
    given = None if profile is None else load_profile(str(profile))
    return predict_within(lowered, memory, under(cost_for(plan, given), execution))


def run(plan: Plan, options: RunOptions = RunOptions()) -> "RunResult":  # noqa: B008  (it is frozen)
    """Steps of a plan for real, on processes of this machine, one per rank.

    Returns:
        Traces, one per timed step, losses, and what else the run brought back.

    Raises:
        ValueError: a plan, data, weights or folders that are refused; a device that is not the CPU.
        WorldFailed: a rank died or raised; every rank has been ended, the message names the cause.
    """
    from runtime.launch import prepare, run_lowered

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


def _name(profile: str | Path | None) -> str | None:
    return None if profile is None else str(profile)


def _planners(names: Sequence[str], judge: JudgedBy | str) -> dict[str, Planner]:
    """Of strategies by name, held against the simulator or as published."""
    from sim.predict import candidate_s

    specs = [_spec(name) for name in names]
    if JudgedBy(judge) is JudgedBy.PLANNER:
        return {spec.name: spec.planner for spec in specs}
    return {spec.name: judged(spec, candidate_s) for spec in specs}


def _spec(strategy: str) -> StrategySpec:
    if strategy not in BY_NAME:
        near = get_close_matches(strategy, BY_NAME, n=1, cutoff=0.0)[0]
        raise ValueError(f"strategy {strategy!r}: want one of {', '.join(BY_NAME)}; nearest: {near}")
    return BY_NAME[strategy]
