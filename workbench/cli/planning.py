"""Commands that make and judge plans: plan, search, check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import print_result, show, warn
from workbench.cli.joint_searching import Sought, Told, search_jointly
from workbench.cli.judging import JudgeFlag, Strategy, planners_by
from workbench.cli.options import Json, PlanFile, takes
from workbench.cli.searching import Drawn, NoCache, check_drawable, draw, judging, kept_results, searched
from workbench.cost.model import CostModel
from workbench.explain.warnings import waste_of
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.job.matching import check_job, named_profile
from workbench.job.run_options import asked
from workbench.job.sample_sizes import Tiling, with_sizes
from workbench.plan.codec import loads, plan_hash, read_plan, write_plan
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_boundaries, check_runnable
from workbench.planner.judged import JudgedBy
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

DEFAULT_STRATEGY = Strategy("cornstarch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is planned for which machines, where that is not as the job file says; as flags."""

    profile: str | None = field(default=None, metadata=asked("profile name or file instead of the job's"))
    layout: Path | None = field(
        default=None,
        metadata=asked("file with layouts instead of the job's, in any notation of `layout`"),
    )
    sizes: str | None = field(
        default=None,
        metadata=asked(
            "sizes of samples: a corpus by name, or a .jsonl or .parquet file or saved data set with the "
            "columns text_tokens, image_width and image_height, audio_seconds"
        ),
    )
    seed: int = field(
        default=0, metadata=asked("of a corpus of --sizes; in `search` also of --batches, --mtbf and --joint")
    )
    tiling: Tiling = field(
        default=Tiling.NONE, metadata=asked("of images of --sizes in an encoder of one size")
    )
    execution: Path | None = field(
        default=None, metadata=asked("JSON file of the training system's rates and host times")
    )

    def job(self, file: Path, strategy: str | None = None) -> Job:
        """The job file's, with samples and layouts from elsewhere where they are asked for."""
        found = load_job(file)
        if self.sizes is not None:
            found = with_sizes(found, self.sizes, seed=self.seed, tiling=self.tiling)
        return found if self.layout is None else with_layout_file(found, self.layout, strategy)

    def cost(self, job: Job) -> CostModel:
        """Its machines'."""
        return cost_of(job, self.profile, self.execution)

    def write(self, plan: Plan, job: Job, output: Path) -> None:
        """A plan file that names the profile."""
        write_plan(plan, output, profile=named_profile(job, self.profile, output))


@takes(Wanted)
def plan_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[Path, typer.Option("-o", "--output", help="plan file to write")],
    strategy: Annotated[Strategy, typer.Option(help="how to parallelise")] = DEFAULT_STRATEGY,
    schedule: Annotated[
        ScheduleKind | None, typer.Option(help="order of passes instead of the job's")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="data folder whose samples are the batch")] = None,
    wanted: Wanted = Wanted(),
    judge: JudgeFlag = JudgedBy.SIMULATOR,
    as_json: Json = False,
) -> None:
    """Turn a job into a plan."""
    check_writable(output)
    if wanted.sizes is not None and data is not None:
        raise ValueError("plan: --sizes and --data both bring samples; want one of them")
    planned = wanted.job(job, strategy)
    if schedule is not None:
        planned = replace(planned, schedule=usual(schedule))
    cost = wanted.cost(planned)
    if data is not None:
        from runtime.data.dataset import with_data

        planned = with_data(planned, data)
    with ticking(f"planning {strategy}", None, quiet=as_json) as ticker:

        def progress(done: int, total: int, best_s: float) -> None:
            ticker.at(done, total, f"best so far {milliseconds(best_s)}" if best_s < float("inf") else "")

        made = planners_by(judge, [strategy])[strategy](planned, cost, progress)
    accept(made)
    if BY_NAME[strategy].batch_level:
        warning = too_small(planned, cost, len(made.ranks) // planned.replicas)
        if warning is not None:
            warn(warning)
    for line in waste_of(made, planned):
        warn(line)
    wanted.write(made, planned, output)
    record = {"plan": str(output), "plan_hash": plan_hash(made), "strategy": made.strategy}
    print_result(
        record, plan_table(made), f"written to {output}, hash {plan_hash(made)[:12]}", as_json=as_json
    )


@takes(Wanted)
@takes(Asked)
@takes(Told)
def search_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="plan file of the best")] = None,
    objective: Annotated[Objective, typer.Option(help="what is best")] = Objective.ITERATION,
    schedule: Annotated[
        list[ScheduleKind] | None,
        typer.Option(help="orders of passes to try instead of the job's; repeatable"),
    ] = None,
    wanted: Wanted = Wanted(),
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
    judge: JudgeFlag = JudgedBy.SIMULATOR,
    no_cache: NoCache = False,
    told: Told = Told(),  # noqa: B008  (it is frozen)
    as_json: Json = False,
) -> None:
    """Plan a job with every strategy, and with every schedule asked for; simulate all plans and rank them."""
    if pareto is not None:
        check_drawable(pareto)
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
        names = (*PLANNERS, *(PRICED if planned.has_prices else ()))
        planners = _varied(planners_by(judge, names), objective, (), asked)
        sought = Sought(planned, cost, judged, planners, judge, wanted.seed)
        best, emit = search_jointly(sought, told, results, pareto, as_json=as_json)
        if output is not None:
            wanted.write(best, planned, output)
        emit()
        return
    names = (*PLANNERS, *(PRICED if objective.is_money else ()))
    planners = with_schedules(planners_by(judge, names), [usual(kind) for kind in schedule or ()])
    if objective is Objective.TRAINING and not ranks and not planned.pools:
        ranks = _shares(planned.usable_ranks)
    planners = _varied(planners, objective, ranks or (), asked)
    with ticking("searching", len(planners), quiet=as_json) as ticker:
        found = searched(planned, cost, planners, judged, ticker.at, results, judge)
    for line in found.record["warnings"]:
        warn(line)
    written = []
    if output is not None:
        wanted.write(loads(found.best_plan), planned, output)
        written.append(f"best plan written to {output}")
    if pareto is not None:
        written.append(draw(found.record, pareto))
    print_result(found.record, fits_text(found.record), search_table(found.record), *written, as_json=as_json)


def _check_joint(said: Mapping[str, object]) -> None:
    """Raise ValueError for what only a search without --joint takes."""
    flag = next((name for name, value in said.items() if value), None)
    if flag is not None:
        raise ValueError(f"search: --joint searches everything itself, got {flag}; want one of the two")


def _varied(
    planners: Mapping[str, Planner], objective: Objective, counts: Sequence[int], asked: Asked
) -> dict[str, Planner]:
    """The planners as an objective tries them: on other ranks, for seconds too, and templates."""
    found = dict(planners)
    if objective is Objective.TRAINING and asked.deadline is not None:
        found = for_seconds_too(found)
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
    for node in found.cluster.nodes:
        check_boundaries(found, node.device)
    programs = titled("programs", ("ranks",))
    programs.add_column("actions", overflow="fold")
    for program in found.programs:
        programs.add_row(rank_runs(program.ranks), " ".join(map(str, program.actions)))
    accepted = f"accepted: sound, fits, free of deadlock; hash {plan_hash(found)[:12]}"
    show(accepted, plan_table(found), programs)
