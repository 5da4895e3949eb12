"""How `elastic` speaks of a training: before it runs, while it runs, and of how it ended."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from runtime.elastic.forecast import Forecast, StepPrediction
from runtime.elastic.job import ElasticJob
from runtime.elastic.outcome import (
    LayoutTimes,
    Sizes,
    detection_s,
    forecast_record,
    layout_times,
    next_step_s,
    ran_record,
)
from runtime.elastic.progress import Progress
from runtime.elastic.run import Ran, Saving, run_elastic
from runtime.elastic.training import ElasticTraining
from workbench.cli.console import emit_json, show, warn
from workbench.cli.resilience import template_table
from workbench.elastic.step_events import StepEvents
from workbench.finite_json import finite
from workbench.report.elastic_plot import draw_elastic
from workbench.report.progress import ticking
from workbench.report.tables import listed, mebibytes, milliseconds, percent, unmeasured_text
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
        _write(forecast_record(task.forecast, task.predictions), out / PREDICTIONS)
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


def _write(record: dict[str, Any], file: Path) -> None:
    write_text(json.dumps(finite(record), indent=1, sort_keys=True, allow_nan=False) + "\n", file)


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
        _write(record, out / RECORD)
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


def forecast_table(
    name: str, forecast: Forecast, predictions: Mapping[Sizes, StepPrediction], samples: int
) -> Table:
    """One line per interval of steps."""
    return listed(
        f"{name}, predicted before it runs",
        [(each, predictions[each.layout.sizes]) for each in forecast.intervals],
        ("steps taken", lambda row: f"{row[0].first} to {row[0].end}"),
        ("", lambda row: row[0].why),
        ("nodes", lambda row: str(row[0].layout.num_nodes)),
        ("pipelines of", lambda row: sizes_text(row[0].layout.sizes)),
        ("to copy", lambda row: mebibytes(row[0].copied_bytes)),
        ("simulated", lambda row: milliseconds(row[1].simulated_s)),
        ("planning", lambda row: milliseconds(row[1].planning_s)),
        ("feeding", lambda row: milliseconds(row[1].feeding_s)),
        ("step", lambda row: milliseconds(row[1].step_s)),
        ("samples/s", lambda row: f"{samples / row[1].step_s:.4g}"),
    )


def changes_table(ran: Ran) -> Table:
    """One line per change of the layout, with the step that came after it."""
    return listed(
        "node changes",
        zip((None, *ran.changes), ran.changes, strict=False),
        ("taken", lambda row: str(row[1].step)),
        ("cause", lambda row: f"{row[1].cause}" + (f", {n} attempts" if (n := row[1].attempts) > 1 else "")),
        ("nodes", lambda row: " ".join((*(f"-{n}" for n in row[1].lost), *(f"+{n}" for n in row[1].joined)))),
        ("pipelines of", lambda row: " > ".join(sizes_text(each.sizes) for each in row if each is not None)),
        ("detection", lambda row: _milliseconds(detection_s(ran, row[1]))),
        ("planning", lambda row: milliseconds(row[1].planning_s)),
        ("groups", lambda row: milliseconds(row[1].groups_s)),
        ("copying", lambda row: milliseconds(row[1].copying_s)),
        ("in all", lambda row: milliseconds(row[1].recovery_s + (detection_s(ran, row[1]) or 0.0))),
        ("next step", lambda row: _milliseconds(next_step_s(ran, row[1]))),
        ("copied", lambda row: mebibytes(row[1].num_bytes)),
    )


def times_table(times: Sequence[LayoutTimes]) -> Table:
    """One line per layout."""
    return listed(
        "step time by layout",
        times,
        ("pipelines of", lambda found: sizes_text(found.sizes)),
        ("predicted", lambda found: _milliseconds(found.predicted_s)),
        ("measured (median)", lambda found: _milliseconds(found.median_s)),
        ("error", lambda found: percent(found.error, signed=True)),
        ("quartiles apart", lambda found: percent(found.spread, signed=False)),
        ("core time", lambda found: _milliseconds(found.predicted_core_s)),
        ("measured", lambda found: _milliseconds(found.measured_core_s)),
        ("error", lambda found: percent(found.core_error, signed=True)),
        ("steps", lambda found: str(len(found.measured_s))),
    )


def cores_text(ran: Ran) -> tuple[str, ...]:
    """How much of the machine was others': what no prediction knows."""
    if ran.cores is None:
        return ()
    return (
        f"busy cores: {ran.cores.own:.2f} of {ran.cores.num_cores} with this training, "
        f"{ran.cores.others:.2f} with other programs",
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def sizes_text(sizes: Sizes) -> str:
    """2 + 3, and 3x1 + 2 for three of 1 beside one of 2."""
    runs = ((size, len(list(run))) for size, run in groupby(sizes))
    return " + ".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)
