"""Commands that make and check plans: plan, check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from workbench.cli.console import first_rows, is_for_programs, print_result, warn
from workbench.cli.job_reading import read_job
from workbench.cli.judging import JudgeFlag, Strategy, planners_by
from workbench.cli.options import Json, PlanFile, with_flags_of
from workbench.cost.model import CostModel
from workbench.explain.warnings import warnings_of
from workbench.job.first_rows import SizesRead, sizes_of
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.job.matching import check_job, named_profiles
from workbench.job.run_options import asked
from workbench.job.sample_sizes import Tiling
from workbench.memory.account import fullest_bytes
from workbench.memory.rank_peaks import fullest_ranks, rank_peaks
from workbench.plan.codec import plan_hash, read_plan, write_plan
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_runnable_here, refusal_to_run
from workbench.planner.judged import JudgedBy
from workbench.planner.stable_batch import too_small
from workbench.report.figure import Figure
from workbench.report.packed_rows import packed_line, packed_record
from workbench.report.peak_table import peak_lines, peak_records, peak_table
from workbench.report.progress import ticking
from workbench.report.stage_table import folded_plan_table, folded_programs
from workbench.report.tables import (
    milliseconds,
    plan_table,
    rank_runs,
    titled,
)
from workbench.schedule.action import Action
from workbench.schedule.choice import ScheduleKind, usual
from workbench.strategies.encoder_placement import with_layout_file
from workbench.strategies.registry import BY_NAME
from workbench.timing.accept import accept
from workbench.whole_file import check_writable

DEFAULT_STRATEGY = Strategy("cornstarch")
MOST_ACTIONS = 100  # of a program that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Flags that replace parts of a job file: samples, layouts, profile and execution file."""

    profile: str | None = field(
        default=None, metadata=asked("profile name or file; replaces the one in the job")
    )
    layout: Path | None = field(
        default=None,
        metadata=asked("file with layouts in any notation of `layout`; replaces those in the job"),
    )
    sizes: str | None = field(
        default=None,
        metadata=asked(
            "sizes of samples: name of a corpus, or a .jsonl, .csv or .parquet file or saved data set with "
            "the columns text_tokens, image_width, image_height, video_width, video_height, video_seconds, "
            "audio_seconds"
        ),
    )
    seed: int = field(
        default=0,
        metadata=asked("random seed of --sizes; in `search` also of --batches, --mtbf and --joint"),
    )
    tiling: Tiling = field(
        default=Tiling.NONE,
        metadata=asked(
            "images of --sizes in a fixed-size encoder: one image, or tiles as the model cuts them, which an "
            "encoder with image_newline always does"
        ),
    )
    pack: int | None = field(
        default=None,
        metadata=asked(
            "tokens of a row: samples of --sizes are packed into the job's samples, rows of at most so many "
            "tokens"
        ),
    )
    execution: Path | None = field(
        default=None,
        metadata=asked("execution file: kernels, rates and host times of the training system"),
    )

    def check_seed(self, random_inputs: Mapping[str, bool]) -> None:
        """Raise ValueError for a seed if no random input is requested.

        Args:
            random_inputs: flag -> whether it was given, for all flags whose inputs are drawn at random.
        """
        if self.seed and not any(random_inputs.values()):
            *others, last = random_inputs
            names = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(
                f"--seed {self.seed} has no effect without {names}; want one of them, or no --seed"
            )

    def job(self, file: Path, strategy: str | None = None) -> Job:
        """The job of a file, with samples and layouts replaced as the flags say."""
        if self.tiling is not Tiling.NONE and self.sizes is None:
            raise ValueError(f"--tiling {self.tiling} cuts images of --sizes; want --sizes, or no --tiling")
        if self.pack is not None and self.sizes is None:
            raise ValueError(
                f"--pack {self.pack} packs samples of --sizes; want --sizes, or pack_tokens in the batch"
            )
        if self.pack is not None and self.pack < 1:
            raise ValueError(f"--pack: want >= 1 token, got {self.pack}")
        job = read_job(file, sizes=self.read_sizes, seed=self.seed)
        return job if self.layout is None else with_layout_file(job, self.layout, strategy)

    @property
    def read_sizes(self) -> SizesRead | None:
        """What --sizes names and how it is read; None: the job's own batch."""
        return None if self.sizes is None else SizesRead(self.sizes, self.tiling, self.pack)

    def files(self, job: Path) -> tuple[Path | str | None, ...]:
        """The job file and what the flags name, of which some may be files."""
        return job, self.sizes, self.profile, self.layout, self.execution

    def cost(self, job: Job) -> CostModel:
        """The cost model of the job's machines, with the profile and execution file of the flags."""
        return cost_of(job, self.profile, self.execution)

    def write(self, plan: Plan, job: Job, output: Path) -> str:
        """Write a plan file with a reference to the profile; warn if the plan can only be simulated.

        Returns:
            Why it cannot run; empty where it can.
        """
        write_plan(plan, output, profiles=named_profiles(job, self.profile, output))
        refusal = refusal_to_run(plan)
        if refusal:
            warn(f"this plan can be simulated, not run: {refusal}")
        return refusal


@with_flags_of(PlanInputs)
def plan_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[Path, typer.Option("-o", "--output", help="plan file to write")],
    strategy: Annotated[
        Strategy | None,
        typer.Option(
            help=f"parallelization strategy; default: {DEFAULT_STRATEGY}, which may be slower than others: "
            "`search` ranks all"
        ),
    ] = None,
    schedule: Annotated[
        ScheduleKind | None, typer.Option(help="pipeline schedule; replaces the one in the job")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="data folder whose samples are the batch")] = None,
    inputs: PlanInputs = PlanInputs(),
    judge: JudgeFlag = JudgedBy.SIMULATOR,
    as_json: Json = False,
) -> None:
    """Make a plan of a job with one strategy."""
    check_writable(output, *inputs.files(job))
    inputs.check_seed({"--sizes": inputs.sizes is not None})
    if inputs.sizes is not None and data is not None:
        raise ValueError("plan: --sizes and --data both bring samples; want one of them")
    name = strategy or DEFAULT_STRATEGY
    planned_job = inputs.job(job, name)
    if schedule is not None:
        planned_job = replace(planned_job, schedule=usual(schedule))
    cost = inputs.cost(planned_job)
    if data is not None:
        from runtime.data.dataset import with_data

        planned_job = with_data(planned_job, data)
    with ticking(f"planning {name}", None, quiet=as_json) as ticker:

        def progress(done: int, total: int, best_s: float) -> None:
            ticker.at(done, total, f"best so far {milliseconds(best_s)}" if best_s < float("inf") else "")

        result = planners_by(judge, [name])[name](planned_job, cost, progress)
    accept(result)
    if BY_NAME[name].batch_level:
        warning = too_small(planned_job, cost, len(result.ranks) // planned_job.replicas)
        if warning is not None:
            warn(warning)
    for line in warnings_of(result, planned_job):
        warn(line)
    refusal = inputs.write(result, planned_job, output)
    record: dict[str, Any] = {
        "plan": str(output),
        "plan_hash": plan_hash(result),
        "strategy": result.strategy,
        "run_refusal": refusal or None,
    }
    read = None if data is not None else inputs.read_sizes or sizes_of(job)
    lines = [f"written to {output}, hash {plan_hash(result)[:12]}"]
    if read is not None and read.pack_tokens is not None:
        record["packed"] = packed_record(planned_job.batch, read.pack_tokens)
        lines.insert(0, packed_line(record["packed"]))
    if not strategy:
        lines.append(f"by the default strategy; workbench search {job} ranks all")
    print_result(record, _stages(result), *lines, as_json=as_json)


def _stages(plan: Plan) -> Table:
    """A row for each stage; printed, one for equal stages of all replicas."""
    return plan_table(plan) if is_for_programs() else first_rows(folded_plan_table(plan))


def check_command(
    plan: PlanFile,
    job: Annotated[
        Path | None, typer.Option(help="job file whose model and cluster the plan must match")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="show what is in this rank's memory; default: in the fullest of each module"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a plan is valid, fits in memory and cannot deadlock; show stages, memory and programs."""
    parsed_plan = read_plan(plan)
    if job is not None:
        check_job(parsed_plan, read_job(job), plan)
    lowered, memory = accept(parsed_plan)
    check_runnable_here(parsed_plan)
    shown = fullest_ranks(lowered, memory) if rank is None else (rank,)
    peaks = tuple(rank_peaks(lowered, memory, shown))
    accepted = f"accepted: sound, fits, free of deadlock; hash {plan_hash(parsed_plan)[:12]}"
    record = {
        "plan": str(plan),
        "plan_hash": plan_hash(parsed_plan),
        "strategy": parsed_plan.strategy,
        "ranks": len(parsed_plan.ranks),
        "peak_bytes": fullest_bytes(parsed_plan),
        "peaks": peak_records(peaks),
    }
    stages, programs = _stages(parsed_plan), first_rows(_programs(parsed_plan))
    lines = peak_lines(parsed_plan, peaks)
    print_result(record, accepted, stages, peak_table(peaks), *lines, programs, as_json=as_json)


def _programs(plan: Plan) -> Table:
    """A row for each program; printed, one for all that differ in the numbers of stages alone."""
    programs = plan.programs if is_for_programs() else folded_programs(plan)
    table = titled("programs", ("ranks",))
    table.add_column("actions", overflow="fold")
    for program in programs:
        table.add_row(rank_runs(program.ranks), _actions_text(program.actions))
    if len(programs) < len(plan.programs):
        table.caption = "ranks of a row do the same on stages of their own; those of the first are shown"
        table.caption_justify = "left"
    return table


def _actions_text(actions: Sequence[Action]) -> Figure:
    """The first actions of a program; all of them where a program reads the table."""
    shown = " ".join(map(str, actions[:MOST_ACTIONS]))
    more = f" ... {len(actions) - MOST_ACTIONS:,} more" if len(actions) > MOST_ACTIONS else ""
    return Figure(shown + more, {"": " ".join(map(str, actions))})
