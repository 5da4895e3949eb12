"""How `elastic` speaks of a training: before it runs, while it runs, and of how it ended."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from runtime.elastic.forecast import Forecast, StepPrediction
from runtime.elastic.job import ElasticJob
from runtime.elastic.outcome import Sizes, forecast_record, layout_times, ran_record
from runtime.elastic.progress import Progress
from runtime.elastic.run import Ran, Saving, run_elastic
from runtime.elastic.training import ElasticTraining
from workbench.cli.console import emit_json, show, warn
from workbench.cli.elastic_tables import (
    changes_table,
    cores_text,
    forecast_table,
    sizes_text,
    times_table,
)
from workbench.cli.resilience import template_table
from workbench.elastic.step_events import StepEvents
from workbench.report.elastic_plot import draw_elastic
from workbench.report.progress import ticking
from workbench.report.tables import unmeasured_text
from workbench.strategies.elastic_templates import ElasticTemplates
from workbench.whole_file import write_text

RECORD, PREDICTIONS, PLOT = "elastic.json", "predictions.json", "elastic.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, what will happen, and what was predicted of it."""

    found: ElasticTemplates
    job: ElasticJob
    events: StepEvents
    steps: int
    forecast: Forecast
    predictions: Mapping[Sizes, StepPrediction]

    @property
    def samples(self) -> int:
        """Of a step."""
        return len(self.found.job.batch)


def run_task(task: Task, start: Progress | None, saving: Saving | None, *, quiet: bool) -> Ran:
    """Train, with a bar that shows how it goes."""
    first = task.events.first
    with ticking(f"training {task.found.job.name}", task.steps, quiet=quiet) as ticker:
        ended_s: list[float] = []

        def tell(training: ElasticTraining) -> None:
            done = training.steps[-1]
            ended_s.append(done.end_s)
            rate = f"{task.samples / (ended_s[-1] - ended_s[-2]):.3g} samples/s" if len(ended_s) > 1 else ""
            nodes = f"{sum(done.sizes)} nodes as {sizes_text(done.sizes)}"
            ticker.at(done.step + 1, task.steps, f"loss {done.loss:.6f}, {nodes}, {rate}")

        ticker.at(first, task.steps)
        return run_elastic(
            task.job, task.events, task.steps, start=start, saving=saving, tell=tell, warn=warn
        )


def print_forecast(task: Task, out: Path | None, *, quiet: bool) -> None:
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


def print_outcome(task: Task, ran: Ran, out: Path | None, *, as_json: bool) -> None:
    """Show, and write, what happened beside what was predicted."""
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
            draw_elastic(record, out / PLOT)
            written.append(out / PLOT)
    if as_json:
        emit_json(record)
        return
    losses = [f"loss {done.loss:.6f} of step {done.step + 1}" for done in (*ran.steps[:1], *ran.steps[-1:])]
    show(changes_table(ran), times_table(times), *cores_text(ran), *((", ".join(losses),) if losses else ()))
    show(*(f"written to {path}" for path in written))


def end(ran: Ran) -> None:
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
