"""The command that trains on nodes that come and go: real processes of this machine, killed as told."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.console import emit_json, show, ticking
from workbench.cli.elastic_data import drawn, read_folder
from workbench.cli.elastic_forecast import Forecast, StepPrediction, foresee, predict_steps
from workbench.cli.elastic_nodes import Shape, events_of, last_step, parsed_trace
from workbench.cli.elastic_run import Ran, Saving, elastic_job, latest_progress, run_elastic
from workbench.cli.elastic_tables import (
    Sizes,
    changes_table,
    cores_text,
    forecast_record,
    forecast_table,
    layout_times,
    ran_record,
    sizes_text,
    times_table,
)
from workbench.cli.machines import cost_of
from workbench.cli.options import ExecutionFile, Json
from workbench.cli.resilience import Faults, JobFile, Profile, template_table
from workbench.elastic.step_events import StepEvents
from workbench.job.job import load_job
from workbench.plan.plan import Sharding
from workbench.report.tables import unmeasured_text
from workbench.strategies.elastic_templates import ElasticTemplates, elastic_templates
from workbench.units import S_PER_DAY
from workbench.whole_file import check_writable, write_text

if TYPE_CHECKING:
    from runtime.elastic.job import ElasticJob
    from runtime.elastic.progress import Progress
    from runtime.elastic.training import ElasticTraining

RECORD, PREDICTIONS, PLOT = "elastic.json", "predictions.json", "elastic.png"


def elastic_command(
    job: JobFile,
    steps: Annotated[
        int | None, typer.Option(help="in all, since the seed; default: the trace's, or 20")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="at most; default: the job's ranks, or the trace's nodes")
    ] = None,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="processes of a node")] = 1,
    ranks_per_stage: Annotated[
        int, typer.Option("--ranks-per-stage", help="that share out the samples of every microbatch")
    ] = 1,
    sharding: Annotated[
        Sharding,
        typer.Option(help="what else these share out: none, or parameters and their optimizer state"),
    ] = Sharding.NONE,
    faults: Faults = 1,
    event: Annotated[
        list[str] | None,
        typer.Option(
            help="STEP:kill|join|warn:NODE when so many steps were taken; nodes are node0, node1, ...",
            metavar="STEP:WHAT:NODE",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="instead of events: CSV with the columns t_s, event, node")
    ] = None,
    step_s: Annotated[
        float | None, typer.Option("--step-s", help="seconds of the trace that a step stands for")
    ] = None,
    notice_s: Annotated[
        float, typer.Option(help="warning in the trace's seconds before a node leaves; 0: it is killed")
    ] = 0.0,
    checkpoint: Annotated[
        Path | None, typer.Option(help="folder that progress is saved in when training ends or must stop")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps; also save meanwhile")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="go on from the furthest save in a --checkpoint folder")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="data folder, read over and over; default: random data")
    ] = None,
    seed: Annotated[int, typer.Option(help="of weights and random data")] = 0,
    timeout: Annotated[float, typer.Option(help="seconds, of any single wait")] = 30.0,
    out: Annotated[Path | None, typer.Option("--out", help="folder for predictions, record and plot")] = None,
    profile: Profile = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Train for real on nodes that are killed, warned and join, and say before what a step will take."""
    if checkpoint_every is not None and checkpoint is None:
        raise ValueError("elastic: --checkpoint-every wants --checkpoint FOLDER")
    if not 0 < timeout <= S_PER_DAY:
        raise ValueError(f"elastic: want --timeout > 0 and at most {S_PER_DAY:g} s, got {timeout}")
    for path in (
        *((out / name for name in (RECORD, PREDICTIONS, PLOT)) if out else ()),
        *_inside(checkpoint),
    ):
        check_writable(path)
    happens = parsed_trace(trace, step_s, event, notice_s)
    shape = Shape(
        job=load_job(job),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        ranks_per_stage=ranks_per_stage,
        trace=None if happens is None else happens.trace,
    )
    cost = cost_of(shape.job, profile, execution)
    whole = shape.on_nodes()
    reads = drawn(whole, seed) if data is None else read_folder(whole, data)
    found = elastic_templates(
        reads.job,
        cost,
        num_nodes=shape.num_nodes,
        num_faults=faults,
        sharing=ranks_per_stage,
        sharding=sharding,
    )
    trained = elastic_job(found, reads, seed=seed, wait_s=timeout, num_cores=shape.num_cores)
    start = None if resume is None else latest_progress(trained, resume)
    until = last_step(steps, happens, start)
    events = events_of(event or (), happens, shape, 0 if start is None else start.step, until)
    forecast = foresee(trained, events, until)
    predictions = predict_steps(found, trained, forecast, shape.job.cluster, cost, reads.looks)
    task = Task(
        found=found, job=trained, events=events, steps=until, forecast=forecast, predictions=predictions
    )
    task.check_patience()
    saving = None if checkpoint is None else Saving(folder=checkpoint, every=checkpoint_every)
    _foretell(task, out, quiet=as_json)
    ran = task.run(start, saving, quiet=as_json)
    _report(task, ran, out, as_json=as_json)
    _end(ran)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, what will happen, and what was predicted of it."""

    found: ElasticTemplates
    job: "ElasticJob"
    events: StepEvents
    steps: int
    forecast: Forecast
    predictions: Mapping[Sizes, StepPrediction]

    @property
    def samples(self) -> int:
        """Of a step."""
        return len(self.found.job.batch)

    def check_patience(self) -> None:
        """Raise ValueError where a step is predicted to outlast the waits."""
        slowest = max((found.step_s for found in self.predictions.values()), default=0.0)
        if slowest > self.job.wait_s:
            raise ValueError(
                f"elastic: a step is predicted to take {slowest:.3g} s, every wait ends after "
                f"{self.job.wait_s:g} s; want --timeout {3 * slowest:.0f}"
            )

    def run(self, start: "Progress | None", saving: Saving | None, *, quiet: bool) -> Ran:
        """Train, with a bar that shows how it goes."""
        first = self.events.first
        with ticking(f"training {self.found.job.name}", self.steps, quiet=quiet) as ticker:
            ended_s: list[float] = []

            def tell(training: "ElasticTraining") -> None:
                done = training.steps[-1]
                ended_s.append(done.end_s)
                rate = (
                    f"{self.samples / (ended_s[-1] - ended_s[-2]):.3g} samples/s" if len(ended_s) > 1 else ""
                )
                nodes = f"{sum(done.sizes)} nodes as {sizes_text(done.sizes)}"
                ticker.at(done.step + 1, self.steps, f"loss {done.loss:.6f}, {nodes}, {rate}")

            ticker.at(first, self.steps)
            return run_elastic(self.job, self.events, self.steps, start=start, saving=saving, tell=tell)


def _foretell(task: Task, out: Path | None, *, quiet: bool) -> None:
    """Show and write what is predicted, before anything runs."""
    if out is not None:
        text = json.dumps(forecast_record(task.forecast, task.predictions), indent=1, sort_keys=True)
        write_text(text + "\n", out / PREDICTIONS)
    if quiet:
        return
    unmeasured = sorted({cost for found in task.predictions.values() for cost in found.unmeasured})
    name = task.found.job.name
    refusal = () if task.forecast.refusal is None else (f"training will stop at {task.forecast.refusal}",)
    show(
        template_table(task.found),
        forecast_table(name, task.forecast, task.predictions, task.samples),
        *refusal,
        unmeasured_text(unmeasured),
    )


def _report(task: Task, ran: Ran, out: Path | None, *, as_json: bool) -> None:
    times = layout_times(ran, task.predictions)
    specification = task.found.planned.specification
    record: dict[str, Any] = {
        "job": task.found.job.name,
        "samples": task.samples,
        "nodes": specification.num_nodes,
        "threshold": specification.threshold,
        "reduction": str(task.job.reduction),
        "predicted": forecast_record(task.forecast, task.predictions),
        **ran_record(ran, task.samples, times),
    }
    written: list[Path] = []
    if out is not None:
        write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", out / RECORD)
        written.append(out / RECORD)
        if ran.steps:
            from workbench.report.elastic_plot import draw_elastic

            draw_elastic(record, out / PLOT)
            written.append(out / PLOT)
    if as_json:
        emit_json(record)
        return
    losses = [f"loss {done.loss:.6f} of step {done.step + 1}" for done in (*ran.steps[:1], *ran.steps[-1:])]
    show(changes_table(ran), times_table(times), *cores_text(ran), *((", ".join(losses),) if losses else ()))
    show(*(f"written to {path}" for path in written))


def _end(ran: Ran) -> None:
    """Say where progress is; refusals and signals end the program with their code."""
    saved = "" if ran.saved is None else f"; progress after {ran.saved.step} steps is in {ran.saved.folder}"
    if ran.refusal is not None:
        raise ValueError(f"{ran.refusal}{saved}")
    if ran.signal is not None:
        last = ran.steps[-1].step + 1 if ran.steps else 0
        sys.stderr.write(f"workbench: interrupted after {last} steps{saved}\n")
        raise typer.Exit(128 + ran.signal)
    if ran.saved is not None:
        sys.stderr.write(f"workbench: {saved.removeprefix('; ')}\n")


def _inside(folder: Path | None) -> tuple[Path, ...]:
    """A file that could be written in a folder that is to be made."""
    return () if folder is None else (folder / "progress",)
