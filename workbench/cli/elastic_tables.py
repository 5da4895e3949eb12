"""What `elastic` says: the forecast, every change of the nodes, and predicted against measured steps."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.table import Table

from runtime.elastic.forecast import Forecast, StepPrediction
from runtime.elastic.outcome import LayoutTimes, Sizes, detection_s, next_step_s
from runtime.elastic.run import Ran
from workbench.report.tables import mebibytes, milliseconds, percent, titled


def forecast_table(
    name: str, forecast: Forecast, predictions: Mapping[Sizes, StepPrediction], samples: int
) -> Table:
    """One line per interval of steps."""
    headers = (
        "steps taken",
        "",
        "nodes",
        "pipelines of",
        "to copy",
        "simulated",
        "planning",
        "feeding",
        "step",
        "samples/s",
    )
    table = titled(f"{name}, predicted before it runs", headers)
    for interval in forecast.intervals:
        found = predictions[interval.layout.sizes]
        table.add_row(
            f"{interval.first} to {interval.end}",
            interval.why,
            str(interval.layout.num_nodes),
            sizes_text(interval.layout.sizes),
            mebibytes(interval.copied_bytes),
            milliseconds(found.simulated_s),
            milliseconds(found.planning_s),
            milliseconds(found.feeding_s),
            milliseconds(found.step_s),
            f"{samples / found.step_s:.4g}",
        )
    return table


def changes_table(ran: Ran) -> Table:
    """One line per change of the layout, with the step that came after it."""
    headers = (
        "taken",
        "cause",
        "nodes",
        "pipelines of",
        "detection",
        "planning",
        "groups",
        "copying",
        "in all",
        "next step",
        "copied",
    )
    table = titled("changes of the nodes", headers)
    before: Sizes | None = None
    for change in ran.changes:
        after = sizes_text(change.sizes)
        detection = detection_s(ran, change)
        table.add_row(
            str(change.step),
            str(change.cause) + (f", {change.attempts} attempts" if change.attempts > 1 else ""),
            " ".join((*(f"-{node}" for node in change.lost), *(f"+{node}" for node in change.joined))),
            after if before is None else f"{sizes_text(before)} > {after}",
            _milliseconds(detection),
            milliseconds(change.planning_s),
            milliseconds(change.groups_s),
            milliseconds(change.copying_s),
            milliseconds(change.recovery_s + (detection or 0.0)),
            _milliseconds(next_step_s(ran, change)),
            mebibytes(change.num_bytes),
        )
        before = change.sizes
    return table


def times_table(times: Sequence[LayoutTimes]) -> Table:
    """One line per layout."""
    table = titled(
        "seconds of a step, from vote to vote",
        (
            "pipelines of",
            "predicted",
            "measured (median)",
            "error",
            "quartiles apart",
            "core time",
            "measured",
            "error",
            "steps",
        ),
    )
    for found in times:
        table.add_row(
            sizes_text(found.sizes),
            _milliseconds(found.predicted_s),
            _milliseconds(found.median_s),
            percent(found.error, signed=True),
            percent(found.spread, signed=False),
            _milliseconds(found.predicted_core_s),
            _milliseconds(found.measured_core_s),
            percent(found.core_error, signed=True),
            str(len(found.measured_s)),
        )
    return table


def cores_text(ran: Ran) -> tuple[str, ...]:
    """How much of the machine was others': what no prediction knows."""
    if ran.cores is None:
        return ()
    return (
        f"of this machine's {ran.cores.num_cores} cores {ran.cores.own:.2f} were busy with this training, "
        f"{ran.cores.others:.2f} with something else",
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def sizes_text(sizes: Sizes) -> str:
    """2 + 3, and 3x1 + 2 for three of 1 beside one of 2."""
    runs = ((size, len(list(run))) for size, run in groupby(sizes))
    return " + ".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)
