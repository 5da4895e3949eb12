"""Commands that explain step times: explain, diff."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from workbench.cli.budgets import planned_within, stopped_text
from workbench.cli.console import print_result, warn
from workbench.cli.job_reading import read_job
from workbench.cli.judging import Strategy, planners_by
from workbench.cli.options import ExecutionFile, Json, PlanProfile
from workbench.cli.planning import DEFAULT_STRATEGY
from workbench.cost.model import CostModel
from workbench.explain.applicable import is_followed
from workbench.explain.changes import Changes, Judge, try_changes
from workbench.explain.difference import Side, difference
from workbench.explain.explanation import Explanation, account_of, parts_of_all
from workbench.explain.neighbours import neighbours
from workbench.explain.plan_as_job import job_of, origin_of, replanned_by
from workbench.explain.sensitivity import sensitivities
from workbench.explain.uneven_ranks import uneven_ranks
from workbench.explain.warnings import warnings_of
from workbench.export.approximation import open_job
from workbench.job.job import Job
from workbench.job.machines import cost_of, under
from workbench.job.matching import check_job, cost_of_file
from workbench.plan.codec import read_plan
from workbench.plan.plan import Plan
from workbench.planner.budget import Budget, starting_now
from workbench.planner.judged import JudgedBy
from workbench.planner.plan_layouts import Placing
from workbench.report.explained import (
    account_tables,
    changes_tables,
    difference_record,
    difference_tables,
    explanation_record,
    sensitivity_table,
)
from workbench.report.joint_tables import move_text
from workbench.report.progress import ticking
from workbench.report.tables import metrics_table
from workbench.search.joint.choice import NAME as JOINT
from workbench.search.joint.plan_changes import MoveChange, move_origin_of
from workbench.strategies.registry import BY_NAME, PLANNERS
from workbench.timing.accept import accept
from workbench.units import time_limit_s

JOB_SUFFIXES = (".yaml", ".yml")
DEFAULT_BUDGET = "60s"


class _ExplainInputs(NamedTuple):
    """The plan to explain, the cost model of its machines, and its job if known."""

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
    budget: Annotated[str, typer.Option(help="time for planning, and for trying changes")] = DEFAULT_BUDGET,
    as_json: Json = False,
) -> None:
    """Explain the step time of a plan, and find changes that make it shorter.

    Shows the critical path and idle time by cause; neighbours of the plan (other degrees, schedules,
    microbatches, settings, strategies), each planned, checked and simulated; and the sensitivity of the step.
    """
    from sim.predict import predict_within, prices_of, step_s

    time = starting_now(time_limit_s(budget, "--budget"))
    inputs = _inputs_of(plan, strategy, job, profile, execution, time)
    lowered, memory = accept(inputs.plan)
    trace = predict_within(lowered, memory, inputs.cost)
    account = account_of(lowered, trace, inputs.cost, prices_of)
    if inputs.job is not None:
        for line in warnings_of(inputs.plan, inputs.job):
            warn(line)
    hint = uneven_ranks(
        inputs.plan, trace, inputs.job or open_job(inputs.plan), inputs.cost, idle=account.idle
    )
    if hint is not None:
        warn(hint)
    attempted, note = (
        _changes(inputs, time, quiet=as_json) if changes else (None, "no changes tried: --changes 0")
    )
    by_span = sorted(sensitivities(lowered, inputs.cost, step_s), key=lambda sensitivity: -sensitivity.span_s)
    explanation = Explanation(
        plan=inputs.plan,
        trace=trace,
        account=account,
        changes=attempted,
        refusal=note,
        sensitivities=tuple(by_span),
    )
    print_result(
        explanation_record(explanation, changes),
        metrics_table(inputs.plan, [("simulated", trace)]),
        *account_tables(account, trace.iteration_s),
        *(() if attempted is None else changes_tables(attempted, changes)),
        *((note,) if note else ()),
        sensitivity_table(explanation.sensitivities, trace.iteration_s),
        as_json=as_json,
    )


def _inputs_of(
    file: Path,
    strategy: Strategy | None,
    job: Path | None,
    profile: str | None,
    execution: Path | None,
    budget: Budget,
) -> _ExplainInputs:
    if file.suffix not in JOB_SUFFIXES:
        return _inputs_of_plan(file, strategy, job, profile, execution)
    if job is not None:
        raise ValueError(f"explain: {file} is a job file; want no --job, or a plan file")
    planned_job = read_job(file)
    cost = cost_of(planned_job, profile, execution)
    name = strategy or DEFAULT_STRATEGY
    planner = planners_by(JudgedBy.SIMULATOR, [name])[name]
    plan, is_stopped = planned_within(budget, name, planner, planned_job, cost)
    if is_stopped:
        warn(stopped_text([name]))
    return _ExplainInputs(plan, cost, planned_job)


def _inputs_of_plan(
    file: Path, strategy: Strategy | None, job: Path | None, profile: str | None, execution: Path | None
) -> _ExplainInputs:
    if strategy is not None:
        raise ValueError(
            f"explain: {file} is a plan, which has a strategy; want no --strategy, or a job file"
        )
    plan = read_plan(file)
    if job is not None:
        plan_job = read_job(job)
        check_job(plan, plan_job, file)
        return _ExplainInputs(plan, cost_of(plan_job, profile, execution), plan_job)
    return _ExplainInputs(plan, under(cost_of_file(file, plan, profile), execution), None)


def _changes(inputs: _ExplainInputs, budget: Budget, *, quiet: bool) -> tuple[Changes, str]:
    """Outcome of trying the plan's neighbours, and a note for the user.

    Neighbours of a plan that its strategy cannot make again, such as a joint search's, are moves of a joint
    search.
    """
    from sim.predict import step_s

    name = replanned_by(inputs.plan)
    planners = planners_by(JudgedBy.SIMULATOR, (*PLANNERS, name))
    judge = Judge(planners=planners, cost=inputs.cost, step_s=step_s, budget=budget)
    if inputs.plan.strategy == JOINT:
        return _moves_tried(inputs, judge, quiet=quiet), ""
    try:
        origin = origin_of(inputs.plan, inputs.cost, planners[name], inputs.job, budget)
    except ValueError as error:
        note = f"changes are those of a joint search, as {name} cannot plan these layouts: {error}"
        return _moves_tried(inputs, judge, quiet=quiet), note
    others = [other for other in PLANNERS if other != name]
    candidates = tuple(
        change
        for change in neighbours(origin.job, others, inputs.job)
        if change.strategy is not None or is_followed(change, origin.job, BY_NAME[name])
    )
    with ticking("trying changes", len(candidates), quiet=quiet) as ticker:
        changes = try_changes(
            judge.judged(inputs.plan),
            candidates,
            lambda change: judge.planned(change, origin),
            judge,
            ticker.at,
        )
    note = (
        ""
        if origin.is_exact
        else f"{name} makes a different plan of these layouts; changes are relative to that one"
    )
    return changes, note


def _moves_tried(inputs: _ExplainInputs, judge: Judge, *, quiet: bool) -> Changes:
    plan, cost = inputs.plan, inputs.cost
    origin = move_origin_of(plan, inputs.job or job_of(plan, cost, Placing.LEFT), cost)
    candidates = [MoveChange(move.question, move_text(move), move) for move in origin.moves()]
    with ticking("trying changes", len(candidates), quiet=quiet) as ticker:
        return try_changes(judge.judged(plan), candidates, origin.planned, judge, ticker.at)


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
    comparison = difference(*sides)
    names = (first.name, second.name) if first.name != second.name else ("A", "B")
    print_result(difference_record(comparison), *difference_tables(comparison, names), as_json=as_json)


def _side(file: Path, profile: str | None, execution: Path | None) -> Side:
    from sim.predict import predict, prices_of

    plan = read_plan(file)
    cost = under(cost_of_file(file, plan, profile), execution)
    lowered, memory = accept(plan)
    trace = predict(lowered, memory, cost)
    return Side(lowered=lowered, trace=trace, parts=parts_of_all(lowered, cost, prices_of))
