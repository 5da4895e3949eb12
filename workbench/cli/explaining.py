"""Commands that say why: explain, diff."""

from pathlib import Path
from time import monotonic
from typing import Annotated, NamedTuple

import typer

from workbench.cli.console import print_result, warn
from workbench.cli.job_reading import read_job
from workbench.cli.judging import Strategy, planners_by
from workbench.cli.options import ExecutionFile, Json, PlanProfile
from workbench.cli.planning import DEFAULT_STRATEGY
from workbench.cost.model import CostModel
from workbench.explain.changes import Changes, Judge, try_changes
from workbench.explain.difference import Side, difference
from workbench.explain.explanation import Explanation, account_of, parts_of_all
from workbench.explain.neighbours import neighbours
from workbench.explain.plan_as_job import origin_of, replanned_by
from workbench.explain.sensitivity import sensitivities
from workbench.explain.warnings import warnings_of
from workbench.job.job import Job
from workbench.job.machines import cost_of, under
from workbench.job.matching import check_job, cost_of_file
from workbench.plan.codec import read_plan
from workbench.plan.plan import Plan
from workbench.planner.judged import JudgedBy
from workbench.planner.stage_counts import silent
from workbench.report.explained import (
    account_tables,
    changes_tables,
    difference_record,
    difference_tables,
    explanation_record,
    sensitivity_table,
)
from workbench.report.progress import ticking
from workbench.report.tables import metrics_table
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

JOB_SUFFIXES = (".yaml", ".yml")
BUDGET_S = 60.0


class _Asked(NamedTuple):
    """What is to be explained, on which machine; the job where it is known."""

    plan: Plan
    cost: CostModel
    job: Job | None


def explain_command(
    plan: Annotated[Path, typer.Argument(help="plan file, or job file (.yaml)", metavar="PLAN")],
    strategy: Annotated[
        Strategy | None,
        typer.Option(help=f"with a job file: parallelization strategy; default: {DEFAULT_STRATEGY}"),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="job file of the plan; default: derived from the plan")
    ] = None,
    profile: PlanProfile = None,
    execution: ExecutionFile = None,
    changes: Annotated[int, typer.Option(min=0, help="number of changes to show; 0: try none")] = 5,
    budget: Annotated[float, typer.Option(min=0, help="seconds for trying changes")] = BUDGET_S,
    as_json: Json = False,
) -> None:
    """Explain the step time of a plan, and find changes that make it shorter.

    Shows the critical path and idle time by cause; neighbours of the plan (other degrees, schedules,
    microbatches, settings, strategies), each planned, checked and simulated; and the sensitivity of the step.
    """
    from sim.predict import predict_within, prices_of, step_s

    asked = _asked(plan, strategy, job, profile, execution)
    lowered, memory = accept(asked.plan)
    trace = predict_within(lowered, memory, asked.cost)
    account = account_of(lowered, trace, asked.cost, prices_of)
    if asked.job is not None:
        for line in warnings_of(asked.plan, asked.job):
            warn(line)
    tried, note = (
        _changes(asked, budget, quiet=as_json) if changes else (None, "no changes tried: --changes 0")
    )
    sensitive = sorted(sensitivities(lowered, asked.cost, step_s), key=lambda each: -each.span_s)
    found = Explanation(
        plan=asked.plan,
        trace=trace,
        account=account,
        changes=tried,
        refusal=note,
        sensitivities=tuple(sensitive),
    )
    print_result(
        explanation_record(found, changes),
        metrics_table(asked.plan, [("simulated", trace)]),
        *account_tables(account, trace.iteration_s),
        *(() if tried is None else changes_tables(tried, changes)),
        *((note,) if note else ()),
        sensitivity_table(found.sensitivities, trace.iteration_s),
        as_json=as_json,
    )


def _asked(
    file: Path, strategy: Strategy | None, job: Path | None, profile: str | None, execution: Path | None
) -> _Asked:
    if file.suffix not in JOB_SUFFIXES:
        return _of_plan(file, strategy, job, profile, execution)
    if job is not None:
        raise ValueError(f"explain: {file} is a job file; want no --job, or a plan file")
    wanted = read_job(file)
    cost = cost_of(wanted, profile, execution)
    name = strategy or DEFAULT_STRATEGY
    return _Asked(planners_by(JudgedBy.SIMULATOR, [name])[name](wanted, cost, silent), cost, wanted)


def _of_plan(
    file: Path, strategy: Strategy | None, job: Path | None, profile: str | None, execution: Path | None
) -> _Asked:
    if strategy is not None:
        raise ValueError(
            f"explain: {file} is a plan, which has a strategy; want no --strategy, or a job file"
        )
    plan = read_plan(file)
    if job is not None:
        own = read_job(job)
        check_job(plan, own, file)
        return _Asked(plan, cost_of(own, profile, execution), own)
    return _Asked(plan, under(cost_of_file(file, plan, profile), execution), None)


def _changes(asked: _Asked, budget_s: float, *, quiet: bool) -> tuple[Changes | None, str]:
    """What became of the plan's neighbours, and what to know of it."""
    from sim.predict import step_s

    name = replanned_by(asked.plan)
    planners = planners_by(JudgedBy.SIMULATOR, (*PLANNERS, name))
    try:
        origin = origin_of(asked.plan, asked.cost, planners[name], asked.job)
    except ValueError as error:
        return None, f"no changes tried: {name} cannot plan these layouts: {error}"
    end_s = monotonic() + budget_s
    judge = Judge(planners=planners, cost=asked.cost, step_s=step_s, is_over=lambda: monotonic() > end_s)
    todo = tuple(neighbours(origin.job, [other for other in PLANNERS if other != name], asked.job))
    with ticking("trying changes", len(todo), quiet=quiet) as ticker:
        found = try_changes(judge.judged(asked.plan), origin, todo, judge, ticker.at)
    note = (
        ""
        if origin.is_exact
        else f"{name} makes a different plan of these layouts; changes are relative to that one"
    )
    return found, note


def diff_command(
    first: Annotated[Path, typer.Argument(help="plan file", metavar="A")],
    second: Annotated[Path, typer.Argument(help="plan file", metavar="B")],
    profile: Annotated[
        str | None, typer.Option(help="profile name or file; default: that of each plan's job")
    ] = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Compare two plans, and show where the difference of their step times comes from.

    The difference is split twice: along both critical paths, and into compute and waits of the mean rank. The
    changes of each table add up to the difference of the two steps.
    """
    sides = [_side(file, profile, execution) for file in (first, second)]
    found = difference(*sides)
    names = (first.name, second.name) if first.name != second.name else ("A", "B")
    print_result(difference_record(found), *difference_tables(found, names), as_json=as_json)


def _side(file: Path, profile: str | None, execution: Path | None) -> Side:
    from sim.predict import predict, prices_of

    plan = read_plan(file)
    cost = under(cost_of_file(file, plan, profile), execution)
    lowered, memory = accept(plan)
    trace = predict(lowered, memory, cost)
    return Side(lowered=lowered, trace=trace, parts=parts_of_all(lowered, cost, prices_of))
