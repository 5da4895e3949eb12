"""Output of `elastic`: prediction, progress and outcome of a training."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

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
    """A training, the events that will happen in it, and its prediction."""

    templates: ElasticTemplates
    job: ElasticJob
    events: StepEvents
    steps: int
    forecast: Forecast
    predictions: Mapping[Sizes, StepPrediction]

    @property
    def samples(self) -> int:
        """Number of samples per step."""
        return len(self.templates.job.batch)


def run_task(task: Task, start: Progress | None, saving: Saving | None, *, quiet: bool) -> Ran:
    """Train with a progress bar."""
    first = task.events.first
    with ticking(f"training {task.templates.job.name}", task.steps, quiet=quiet) as ticker:
        end_times_s: list[float] = []

        def show_step(training: ElasticTraining) -> None:
            last_step = training.steps[-1]
            end_times_s.append(last_step.end_s)
            rate = (
                f"{task.samples / (end_times_s[-1] - end_times_s[-2]):.3g} samples/s"
                if len(end_times_s) > 1
                else ""
            )
            nodes = f"{sum(last_step.sizes)} nodes as {sizes_text(last_step.sizes)}"
            ticker.at(last_step.step + 1, task.steps, f"loss {last_step.loss:.6f}, {nodes}, {rate}")

        ticker.at(first, task.steps)
        return run_elastic(
            task.job, task.events, task.steps, start=start, saving=saving, tell=show_step, warn=warn
        )


def print_forecast(task: Task, out: Path | None, *, quiet: bool) -> None:
    """Print the prediction before the training, and write it to a file in `out`."""
    if out is not None:
        _write(forecast_record(task.forecast, task.predictions), out / PREDICTIONS)
    if quiet:
        return
    unmeasured = sorted({cost for prediction in task.predictions.values() for cost in prediction.unmeasured})
    name = task.templates.job.name
    refusal = () if task.forecast.refusal is None else (f"training will stop at {task.forecast.refusal}",)
    show(
        template_table(task.templates),
        forecast_table(name, task.forecast, task.predictions, task.samples),
        *refusal,
        unmeasured_text(unmeasured),
    )


def _write(record: dict[str, Any], file: Path) -> None:
    write_text(json.dumps(finite(record), indent=1, sort_keys=True, allow_nan=False) + "\n", file)


def print_outcome(task: Task, result: Ran, out: Path | None, *, as_json: bool) -> None:
    """Print the outcome beside the prediction, and write both to files in `out`."""
    times = layout_times(result, task.predictions)
    specification = task.templates.planned.specification
    record: dict[str, Any] = {
        "job": task.templates.job.name,
        "samples": task.samples,
        "nodes": specification.num_nodes,
        "threshold": specification.threshold,
        "reduction": str(task.job.reduction),
        "predicted": forecast_record(task.forecast, task.predictions),
        **ran_record(result, task.samples, times),
    }
    output_files: list[Path] = []
    if out is not None:
        _write(record, out / RECORD)
        output_files.append(out / RECORD)
        if result.steps:
            draw_elastic(record, out / PLOT)
            output_files.append(out / PLOT)
    if as_json:
        emit_json(record)
        return
    losses = [
        f"loss {step.loss:.6f} of step {step.step + 1}" for step in (*result.steps[:1], *result.steps[-1:])
    ]
    show(
        changes_table(result),
        times_table(times),
        *cores_text(result),
        *((", ".join(losses),) if losses else ()),
    )
    show(*(f"written to {path}" for path in output_files))


def finish(result: Ran) -> None:
    """Print where progress was saved; exit with the code of the refusal or signal that ended training."""
    save_note = (
        ""
        if result.saved is None
        else f"; progress after {result.saved.step} steps is in {result.saved.folder}"
    )
    if result.refusal is not None:
        raise ValueError(f"{result.refusal}{save_note}")
    if result.signal is not None:
        last = result.steps[-1].step + 1 if result.steps else 0
        sys.stderr.write(f"workbench: interrupted after {last} steps{save_note}\n")
        sys.exit(128 + result.signal)
    if result.saved is not None:
        sys.stderr.write(f"workbench: {save_note.removeprefix('; ')}\n")


def forecast_table(
    name: str, forecast: Forecast, predictions: Mapping[Sizes, StepPrediction], samples: int
) -> Table:
    """Table with one row per interval of steps between changes of the layout."""
    return listed(
        f"{name}, predicted before it runs",
        [(interval, predictions[interval.layout.sizes]) for interval in forecast.intervals],
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
        key="forecast",
    )


def changes_table(result: Ran) -> Table:
    """Table with one row per change of the layout, and the first step after it."""
    return listed(
        "node changes",
        zip((None, *result.changes), result.changes, strict=False),
        ("taken", lambda row: str(row[1].step)),
        ("cause", lambda row: f"{row[1].cause}" + (f", {n} attempts" if (n := row[1].attempts) > 1 else "")),
        ("nodes", lambda row: " ".join((*(f"-{n}" for n in row[1].lost), *(f"+{n}" for n in row[1].joined)))),
        (
            "pipelines of",
            lambda row: " > ".join(sizes_text(layout.sizes) for layout in row if layout is not None),
        ),
        ("detection", lambda row: _milliseconds(detection_s(result, row[1]))),
        ("planning", lambda row: milliseconds(row[1].planning_s)),
        ("groups", lambda row: milliseconds(row[1].groups_s)),
        ("copying", lambda row: milliseconds(row[1].copying_s)),
        ("in all", lambda row: milliseconds(row[1].recovery_s + (detection_s(result, row[1]) or 0.0))),
        ("next step", lambda row: _milliseconds(next_step_s(result, row[1]))),
        ("copied", lambda row: mebibytes(row[1].num_bytes)),
    )


def times_table(times: Sequence[LayoutTimes]) -> Table:
    """Table of predicted and measured step times, one row per layout."""
    return listed(
        "step time by layout",
        times,
        ("pipelines of", lambda layout: sizes_text(layout.sizes)),
        ("predicted", lambda layout: _milliseconds(layout.predicted_s)),
        ("measured (median)", lambda layout: _milliseconds(layout.median_s)),
        ("error", lambda layout: percent(layout.error, signed=True)),
        ("quartiles apart", lambda layout: percent(layout.spread, signed=False)),
        ("core time", lambda layout: _milliseconds(layout.predicted_core_s)),
        ("measured", lambda layout: _milliseconds(layout.measured_core_s)),
        ("error", lambda layout: percent(layout.core_error, signed=True)),
        ("steps", lambda layout: str(len(layout.measured_s))),
    )


def cores_text(result: Ran) -> tuple[str, ...]:
    """Load of other programs on the machine, which predictions do not include."""
    if result.cores is None:
        return ()
    return (
        f"busy cores: {result.cores.own:.2f} of {result.cores.num_cores} with this training, "
        f"{result.cores.others:.2f} with other programs",
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def sizes_text(sizes: Sizes) -> str:
    """Sizes of pipelines as text: (2, 3) is "2 + 3", (1, 1, 1, 2) is "3x1 + 2"."""
    runs = ((size, len(list(run))) for size, run in groupby(sizes))
    return " + ".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)
