"""The command that searches among plans: search."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import print_result, warn
from workbench.cli.joint_searching import Sought, Told, search_jointly
from workbench.cli.judging import JudgeFlag, planners_by
from workbench.cli.options import Json, with_flags_of
from workbench.cli.planning import Wanted
from workbench.cli.searching import Drawn, NoCache, check_drawable, draw, judging, kept_results, searched
from workbench.job.job import Job
from workbench.plan.codec import loads
from workbench.planner.judged import JudgedBy
from workbench.planner.strategy_spec import Planner
from workbench.report.progress import ticking
from workbench.report.search_tables import fits_text, search_table
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.drive import for_seconds_too, with_ranks, with_schedules
from workbench.search.kept_results import Kept, KeptResults
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions
from workbench.search.objectives.template_plans import NAME as TEMPLATES
from workbench.search.objectives.template_plans import TemplatePlanner
from workbench.strategies.registry import PLANNERS, PRICED


@with_flags_of(Wanted)
@with_flags_of(ObjectiveOptions)
@with_flags_of(Told)
def search_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the best plan to this file")
    ] = None,
    objective: Annotated[Objective, typer.Option(help="what to optimize")] = Objective.ITERATION,
    schedule: Annotated[
        list[ScheduleKind] | None,
        typer.Option(help="pipeline schedules to try; replace the one in the job; repeatable"),
    ] = None,
    wanted: Wanted = Wanted(),  # noqa: B008  (it is frozen)
    asked: ObjectiveOptions = ObjectiveOptions(),  # noqa: B008  (it is frozen)
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
    told: Told = Told(),  # noqa: B008  (it is frozen)
    as_json: Json = False,
) -> None:
    """Plan a job with every strategy, simulate the plans and rank them."""
    if pareto is not None:
        check_drawable(pareto)
    _check_seed(wanted, asked, told)
    if told.joint:
        _check_joint({"--schedule": schedule, "--ranks": ranks})
    else:
        told.check_absent()
    planned = wanted.job(job)
    cost = wanted.cost(planned)
    drawn = Drawn(wanted.seed, wanted.sizes, wanted.tiling)
    judged = judging(objective, asked, job, planned, cost, drawn)
    results = None if no_cache else kept_results()
    if told.joint:
        planners = _varied(_planners(judge, is_priced=planned.has_prices), objective, (), asked)
        sought = Sought(planned, cost, judged, planners, judge, wanted.seed)
        best, emit = search_jointly(sought, told, results, pareto, as_json=as_json)
        if output is not None:
            wanted.write(best, planned, output)
        emit()
        return
    planners = _planners(judge, is_priced=objective.is_money)
    planners = with_schedules(planners, [usual(kind) for kind in schedule or ()])
    planners = _varied(planners, objective, ranks or (), asked, fewer=_fewer_ranks(objective, planned))
    found = _search_each(Sought(planned, cost, judged, planners, judge, wanted.seed), results, quiet=as_json)
    written = []
    if output is not None:
        wanted.write(loads(found.best_plan), planned, output)
        written.append(f"best plan written to {output}")
    if pareto is not None:
        written.append(draw(found.record, pareto))
    print_result(found.record, fits_text(found.record), search_table(found.record), *written, as_json=as_json)


def _check_seed(wanted: Wanted, asked: ObjectiveOptions, told: Told) -> None:
    """Raise ValueError for a seed where nothing of a search is drawn."""
    wanted.check_seed(
        {
            "--sizes": wanted.sizes is not None,
            "--batches": asked.batches is not None,
            "--mtbf": asked.mtbf is not None,
            "--joint": told.joint,
        }
    )


def _check_joint(said: Mapping[str, object]) -> None:
    """Raise ValueError for what only a search without --joint takes."""
    flag = next((name for name, value in said.items() if value), None)
    if flag is not None:
        raise ValueError(f"search: --joint already searches what {flag} sets; want one of the two")


def _planners(judge: JudgedBy, *, is_priced: bool) -> dict[str, Planner]:
    """Of all strategies; of those that look at prices where they count."""
    return planners_by(judge, (*PLANNERS, *(PRICED if is_priced else ())))


def _varied(
    planners: Mapping[str, Planner],
    objective: Objective,
    counts: Sequence[int],
    asked: ObjectiveOptions,
    fewer: Sequence[int] = (),
) -> dict[str, Planner]:
    """The planners as an objective tries them: on other ranks, for seconds too, and templates.

    Args:
        counts: of ranks, instead of the job's; none: the job's, and `fewer`.
    """
    found = dict(planners)
    if objective is Objective.TRAINING and asked.deadline is not None:
        found = for_seconds_too(found)
    found = with_ranks(found, counts) if counts else found | with_ranks(found, fewer)
    if objective is Objective.GOODPUT:
        found[TEMPLATES] = TemplatePlanner(asked.recovery_costs.copies - 1)
    return found


def _fewer_ranks(objective: Objective, job: Job) -> Sequence[int]:
    """Numbers of ranks to try besides the job's where what is best counts them: a half and a quarter."""
    if not objective.counts_ranks or job.pools:
        return ()
    num = job.usable_ranks
    return [count for count in (num // 2, num // 4) if count]


def _search_each(sought: Sought, results: KeptResults | None, *, quiet: bool) -> Kept:
    """What comes of a plan by every planner; its warnings are told."""
    job, cost, judged, planners, judge, _ = sought
    with ticking("searching", len(planners), quiet=quiet) as ticker:
        found = searched(job, cost, planners, judged, ticker.at, results, judge)
    for line in found.record["warnings"]:
        warn(line)
    return found
