"""The command that searches among plans: search."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import print_result, show, warn
from workbench.cli.joint_searching import JointFlags, SearchRequest, search_jointly
from workbench.cli.judging import JudgeFlag, Strategy, planners_by
from workbench.cli.options import Json, with_flags_of
from workbench.cli.planning import PlanInputs
from workbench.cli.searching import (
    BatchSource,
    NoCache,
    cached_search,
    check_drawable,
    criterion_of,
    draw,
    kept_plans,
    kept_results,
)
from workbench.job.job import Job
from workbench.plan.codec import loads
from workbench.plan.plan import Plan
from workbench.planner.budget import Budget, starting_now
from workbench.planner.judged import JudgedBy
from workbench.planner.strategy_spec import Planner
from workbench.report.progress import ticking
from workbench.report.search_tables import fits_text, search_table
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.drive import Watch, for_seconds_too, with_ranks, with_schedules
from workbench.search.kept_plans import with_kept_plans
from workbench.search.kept_results import KeptResults
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions
from workbench.search.objectives.template_plans import NAME as TEMPLATES
from workbench.search.objectives.template_plans import TemplatePlanner
from workbench.strategies.registry import PLANNERS, PRICED
from workbench.whole_file import check_writable


@with_flags_of(PlanInputs)
@with_flags_of(ObjectiveOptions)
@with_flags_of(JointFlags)
def search_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the best plan to this file")
    ] = None,
    objective: Annotated[Objective, typer.Option(help="what to optimize")] = Objective.ITERATION,
    strategy: Annotated[
        list[Strategy] | None, typer.Option(help="strategies to try; repeatable; default: all")
    ] = None,
    schedule: Annotated[
        list[ScheduleKind] | None,
        typer.Option(help="pipeline schedules to try; replace the one in the job; repeatable"),
    ] = None,
    inputs: PlanInputs = PlanInputs(),  # noqa: B008  (it is frozen)
    options: ObjectiveOptions = ObjectiveOptions(),  # noqa: B008  (it is frozen)
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="numbers of GPUs to try; replace the one in the job; repeatable; default: all, and without "
            "pools also half and a quarter for the objectives throughput, dollars-per-sample and dollars",
        ),
    ] = None,
    pareto: Annotated[
        Path | None,
        typer.Option(help="plot of all plans by time, memory, GPUs and dollars: .png or .pdf file"),
    ] = None,
    judge: JudgeFlag = JudgedBy.SIMULATOR,
    no_cache: NoCache = False,
    joint_flags: JointFlags = JointFlags(),  # noqa: B008  (it is frozen)
    as_json: Json = False,
) -> None:
    """Plan a job with every strategy, simulate the plans and rank them."""
    if output is not None:
        check_writable(output, *inputs.files(job), joint_flags.replay)
    if pareto is not None:
        check_drawable(pareto)
    _check_seed(inputs, options, joint_flags)
    if joint_flags.joint:
        _check_joint({"--strategy": strategy, "--schedule": schedule, "--ranks": ranks})
    else:
        joint_flags.check_absent()
    planned_job = inputs.job(job)
    cost = inputs.cost(planned_job)
    source = BatchSource(inputs.seed, inputs.read_sizes)
    criterion = criterion_of(objective, options, job, planned_job, cost, source)
    results = None if no_cache else kept_results()
    if joint_flags.joint:
        named = _planners(judge, is_priced=planned_job.has_prices)
        planners = _extended(_kept(named, judge, no_cache=no_cache), objective, (), options)
        request = SearchRequest(planned_job, cost, criterion, planners, judge, inputs.seed)
        best, emit = search_jointly(request, joint_flags, results, pareto, as_json=as_json)
    else:
        named = planners_by(judge, strategy) if strategy else _planners(judge, is_priced=objective.is_money)
        named = _kept(named, judge, no_cache=no_cache)
        planners = with_schedules(named, [usual(kind) for kind in schedule or ()])
        fewer = _fewer_ranks(objective, planned_job)
        planners = _extended(planners, objective, ranks or (), options, fewer)
        if strategy:
            planners.pop(TEMPLATES, None)
        request = SearchRequest(planned_job, cost, criterion, planners, judge, inputs.seed)
        budget = starting_now(joint_flags.budget_s)
        best, emit = _search_each(request, results, pareto, budget, as_json=as_json)
    if output is not None:
        inputs.write(best, planned_job, output)
    emit()
    show(*_written_to(output, as_json=as_json))


def _written_to(output: Path | None, *, as_json: bool) -> tuple[str, ...]:
    """What is said of the file; nothing behind a JSON object, which is the last line."""
    return () if output is None or as_json else (f"best plan written to {output}",)


def _check_seed(inputs: PlanInputs, options: ObjectiveOptions, joint_flags: JointFlags) -> None:
    """Raise ValueError for a seed if no part of the search is random."""
    inputs.check_seed(
        {
            "--sizes": inputs.sizes is not None,
            "--batches": options.batches is not None,
            "--mtbf": options.mtbf is not None,
            "--leaves-per-node-hour": options.leaves_per_node_hour is not None,
            "--joint": joint_flags.joint,
        }
    )


def _check_joint(values: Mapping[str, object]) -> None:
    """Raise ValueError for flags that --joint does not take."""
    flag = next((name for name, value in values.items() if value), None)
    if flag is not None:
        raise ValueError(f"search: --joint already searches what {flag} sets; want one of the two")


def _planners(judge: JudgedBy, *, is_priced: bool) -> dict[str, Planner]:
    """Planners of all strategies; those that minimise dollars only if prices count."""
    return planners_by(judge, (*PLANNERS, *(PRICED if is_priced else ())))


def _kept(planners: dict[str, Planner], judge: JudgedBy, *, no_cache: bool) -> dict[str, Planner]:
    """The planners, which share their plans with other searches of the job unless there is no cache."""
    return planners if no_cache else with_kept_plans(planners, judge, kept_plans())


def _extended(
    planners: Mapping[str, Planner],
    objective: Objective,
    counts: Sequence[int],
    options: ObjectiveOptions,
    fewer: Sequence[int] = (),
) -> dict[str, Planner]:
    """The planners with the variants that an objective needs: other rank counts, seconds, templates.

    Args:
        counts: numbers of ranks that replace the job's; empty: the job's and `fewer`.
        fewer: further numbers of ranks to try if `counts` is empty.
    """
    varied = dict(planners)
    if objective is Objective.TRAINING and options.deadline is not None:
        varied = for_seconds_too(varied)
    varied = with_ranks(varied, counts) if counts else varied | with_ranks(varied, fewer)
    if objective is Objective.GOODPUT:
        varied[TEMPLATES] = TemplatePlanner(options.recovery_costs.copies - 1)
    return varied


def _fewer_ranks(objective: Objective, job: Job) -> Sequence[int]:
    """Half and a quarter of the job's ranks if the objective depends on their number; else none."""
    if not objective.counts_ranks or job.pools:
        return ()
    num = job.usable_ranks
    return [count for count in (num // 2, num // 4) if count]


def _search_each(
    request: SearchRequest,
    results: KeptResults | None,
    pareto: Path | None,
    budget: Budget,
    *,
    as_json: bool,
) -> tuple[Plan, Callable[[], None]]:
    """Rank the plans of all planners, and warn as the result does.

    Returns:
        The best plan, and what prints the result.
    """
    job, cost, criterion, planners, judge, _ = request
    with ticking("searching", len(planners), quiet=as_json) as ticker:
        watch = Watch(progress=ticker.at, budget=budget)
        result = cached_search(job, cost, planners, criterion, watch, results, judge)
    for line in result.record["warnings"]:
        warn(line)
    notes = [] if pareto is None else [draw(result.record, pareto)]
    record = result.record
    return loads(result.best_plan), lambda: print_result(
        record, fits_text(record), search_table(record), *notes, as_json=as_json
    )
