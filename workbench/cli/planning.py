"""Commands that make and judge plans: plan, search, check."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.console import emit_json, show, warn
from workbench.cli.joint_searching import BUDGET, Told, search_jointly
from workbench.cli.judging import JudgeFlag, planners_by
from workbench.cli.options import ExecutionFile, Json, PlanFile, takes
from workbench.cli.searching import Drawn, NoCache, judging, kept_results, searched
from workbench.explain.warnings import waste_of
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.job.matching import check_job, named_profile
from workbench.job.sample_sizes import Tiling, with_sizes
from workbench.plan.codec import loads, plan_hash, read_plan, write_plan
from workbench.plan.runnable import check_runnable
from workbench.planner.judged import JudgedBy
from workbench.planner.layout_search import usable_ranks
from workbench.planner.stable_batch import too_small
from workbench.planner.strategy_spec import Planner
from workbench.report.progress import ticking
from workbench.report.search_tables import fits_text, search_table
from workbench.report.tables import (
    milliseconds,
    plan_table,
    rank_runs,
    titled,
)
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.drive import for_seconds_too, with_ranks, with_schedules
from workbench.search.objectives.asked import Asked
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.template_plans import NAME as TEMPLATES
from workbench.search.objectives.template_plans import TemplatePlanner
from workbench.strategies.placings import with_layout_file
from workbench.strategies.registry import BY_NAME, PLANNERS, PRICED
from workbench.timing.accept import accept
from workbench.whole_file import check_writable

Strategy = StrEnum("Strategy", {name: name for name in BY_NAME})  # type: ignore[misc]
"""Strategies by the names users type; of the registry, which no type checker can read."""
DEFAULT_STRATEGY = Strategy("cornstarch")

Sizes = Annotated[
    str | None,
    typer.Option(
        help="sizes of samples: a corpus by name, or a .jsonl or .parquet file or saved data set with the "
        "columns text_tokens, image_width and image_height, audio_seconds"
    ),
]
Seed = Annotated[int, typer.Option(help="of a corpus of --sizes, and of the draws of `search --joint`")]
LayoutFile = Annotated[
    Path | None,
    typer.Option("--layout", help="file with layouts instead of the job's, in any notation of `layout`"),
]
Tiles = Annotated[Tiling, typer.Option(help="of images of --sizes in an encoder of one size")]


def _job(file: Path, sizes: str | None, seed: int, tiling: Tiling) -> Job:
    """The job file, with samples from elsewhere where they are asked for."""
    found = load_job(file)
    return found if sizes is None else with_sizes(found, sizes, seed=seed, tiling=tiling)


def plan_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[Path, typer.Option("-o", "--output", help="plan file to write")],
    strategy: Annotated[Strategy, typer.Option(help="how to parallelise")] = DEFAULT_STRATEGY,
    schedule: Annotated[
        ScheduleKind | None, typer.Option(help="order of passes instead of the job's")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="profile name or file instead of the job's")] = None,
    data: Annotated[Path | None, typer.Option(help="data folder whose samples are the batch")] = None,
    layout: LayoutFile = None,
    sizes: Sizes = None,
    seed: Seed = 0,
    tiling: Tiles = Tiling.NONE,
    execution: ExecutionFile = None,
    judge: JudgeFlag = JudgedBy.SIMULATOR,
    as_json: Json = False,
) -> None:
    """Turn a job into a plan."""
    check_writable(output)
    if sizes is not None and data is not None:
        raise ValueError("plan: --sizes and --data both bring samples; want one of them")
    wanted = _job(job, sizes, seed, tiling)
    if layout is not None:
        wanted = with_layout_file(wanted, layout, strategy)
    if schedule is not None:
        wanted = replace(wanted, schedule=usual(schedule))
    cost = cost_of(wanted, profile, execution)
    if data is not None:
        from runtime.data.dataset import with_data

        wanted = with_data(wanted, data)
    with ticking(f"planning {strategy}", None, quiet=as_json) as ticker:

        def progress(done: int, total: int, best_s: float) -> None:
            ticker.at(done, total, f"best so far {milliseconds(best_s)}" if best_s < float("inf") else "")

        made = planners_by(judge, [strategy])[strategy](wanted, cost, progress)
    accept(made)
    if BY_NAME[strategy].batch_level:
        warning = too_small(wanted, cost, len(made.ranks) // wanted.replicas)
        if warning is not None:
            warn(warning)
    for line in waste_of(made, wanted):
        warn(line)
    write_plan(made, output, profile=named_profile(wanted, profile, output))
    if as_json:
        emit_json({"plan": str(output), "plan_hash": plan_hash(made), "strategy": made.strategy})
    else:
        show(plan_table(made), f"written to {output}, hash {plan_hash(made)[:12]}")


@takes(Asked)
def search_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="plan file of the best")] = None,
    objective: Annotated[Objective, typer.Option(help="what is best")] = Objective.ITERATION,
    schedule: Annotated[
        list[ScheduleKind] | None,
        typer.Option(help="orders of passes to try instead of the job's; repeatable"),
    ] = None,
    profile: Annotated[str | None, typer.Option(help="profile name or file instead of the job's")] = None,
    layout: LayoutFile = None,
    sizes: Sizes = None,
    seed: Annotated[int, typer.Option(help="of a corpus of --sizes, of --batches and of --mtbf")] = 0,
    tiling: Tiles = Tiling.NONE,
    asked: Asked = Asked(),  # noqa: B008  (it is frozen)
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="numbers of GPUs to try instead of the job's; repeatable; with --objective dollars all, a "
            "half and a quarter, where there are no pools",
        ),
    ] = None,
    pareto: Annotated[
        Path | None,
        typer.Option(help="picture of all plans by time, memory, GPUs and dollars, .png or .pdf"),
    ] = None,
    execution: ExecutionFile = None,
    judge: JudgeFlag = JudgedBy.SIMULATOR,
    no_cache: NoCache = False,
    joint: Annotated[
        bool, typer.Option("--joint", help="search all questions together, from every strategy's plan")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help=f"time for --joint; default: {BUDGET} where no other end is given")
    ] = None,
    gap: Annotated[
        str | None, typer.Option(help="end of --joint: so near the lower bound, such as 2%")
    ] = None,
    candidates: Annotated[int | None, typer.Option(help="end of --joint: so many candidates")] = None,
    workers: Annotated[int, typer.Option(help="processes for --joint")] = 1,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            help="question that --joint leaves to a strategy, such as layout=cornstarch; repeatable"
        ),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="file for every candidate of --joint")] = None,
    replay: Annotated[Path | None, typer.Option(help="log of --joint whose answer is made again")] = None,
    ablate: Annotated[
        Strategy | None,
        typer.Option(
            help="with --joint: what each question alone gains over this strategy, and all together"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a job with every strategy, and with every schedule asked for; simulate all plans and rank them."""
    draw = None if pareto is None else _drawing(pareto)
    told = Told(
        budget=budget,
        gap=gap,
        candidates=candidates,
        workers=workers,
        seed=seed,
        fix=fix or (),
        log=log,
        replay=replay,
        ablate=ablate,
    )
    if not joint:
        told.check_absent()
    wanted = _job(job, sizes, seed, tiling)
    if layout is not None:
        wanted = with_layout_file(wanted, layout)
    cost = cost_of(wanted, profile, execution)
    judged = judging(objective, asked, job, wanted, cost, Drawn(seed, sizes, tiling))
    if joint:
        _check_joint({"--schedule": schedule, "--ranks": ranks, "--pareto": pareto})
        best, emit = search_jointly(wanted, cost, told, judged.judge, as_json=as_json)
        if output is not None:
            write_plan(best, output, profile=named_profile(wanted, profile, output))
        emit()
        return
    names = (*PLANNERS, *(PRICED if objective.is_money else ()))
    planners = with_schedules(planners_by(judge, names), [usual(kind) for kind in schedule or ()])
    planners = _varied(planners, wanted, objective, ranks or [], asked)
    with ticking("searching", len(planners), quiet=as_json) as ticker:
        results = None if no_cache else kept_results()
        found = searched(wanted, cost, planners, judged, ticker.at, results, judge)
    for line in found.record["warnings"]:
        warn(line)
    if output is not None:
        write_plan(loads(found.best_plan), output, profile=named_profile(wanted, profile, output))
    written = [] if output is None else [f"best plan written to {output}"]
    if draw is not None:
        draw(found.record)
        written.append(f"plans drawn in {pareto}")
    if as_json:
        emit_json(found.record)
    else:
        show(fits_text(found.record), search_table(found.record), *written)


def _drawing(path: Path) -> Callable[[Mapping[str, Any]], None]:
    """What draws a search there; ValueError where it cannot be."""
    from workbench.report.pareto_plot import check_picture, draw_search

    check_picture(path)
    check_writable(path)
    return lambda record: draw_search(record, path)


def _check_joint(said: Mapping[str, object]) -> None:
    """Raise ValueError for what only a search without --joint takes."""
    flag = next((name for name, value in said.items() if value), None)
    if flag is not None:
        raise ValueError(f"search: --joint searches everything itself, got {flag}; want one of the two")


def _varied(
    planners: Mapping[str, Planner], job: Job, objective: Objective, counts: Sequence[int], asked: Asked
) -> dict[str, Planner]:
    """The planners as an objective tries them: on other ranks, for seconds too, and templates."""
    found = dict(planners)
    if objective is Objective.TRAINING:
        found = for_seconds_too(found) if asked.deadline is not None else found
        counts = counts or ([] if job.pools else _shares(usable_ranks(job)))
    found = with_ranks(found, counts)
    if objective is Objective.GOODPUT:
        found[TEMPLATES] = TemplatePlanner(asked.recovery_costs.copies - 1)
    return found


def _shares(num_ranks: int) -> list[int]:
    """All, a half and a quarter of them."""
    return sorted({num_ranks, max(1, num_ranks // 2), max(1, num_ranks // 4)}, reverse=True)


def check_command(
    plan: PlanFile,
    job: Annotated[Path | None, typer.Option(help="job file whose model and cluster it must be for")] = None,
) -> None:
    """Say whether a plan is sound, fits and cannot deadlock; show its stages and programs."""
    found = read_plan(plan)
    if job is not None:
        check_job(found, load_job(job), plan)
    accept(found)
    check_runnable(found)
    programs = titled("programs", ("ranks",))
    programs.add_column("actions", overflow="fold")
    for program in found.programs:
        programs.add_row(rank_runs(program.ranks), " ".join(map(str, program.actions)))
    accepted = f"accepted: sound, fits, free of deadlock; hash {plan_hash(found)[:12]}"
    show(accepted, plan_table(found), programs)
