"""What `elastic` says: the forecast, every change of the nodes, and predicted against measured steps."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table

from workbench.cli.elastic_forecast import Forecast, StepPrediction
from workbench.cli.elastic_run import Ran
from workbench.report.tables import mebibytes, milliseconds, percent, titled

if TYPE_CHECKING:
    from runtime.elastic.history import Reshaped

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTimes:
    """Predicted and measured seconds of a step of one layout; None where one of them is missing.

    Args:
        measured_s: from vote to vote, without steps that a change came before or into.
        predicted_core_s, measured_core_s: core seconds of all ranks and the supervisor; the mean over the
            same steps.
    """

    sizes: Sizes
    predicted_s: float | None
    measured_s: tuple[float, ...]
    predicted_core_s: float | None = None
    measured_core_s: float | None = None

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.measured_s) if self.measured_s else None

    @property
    def error(self) -> float | None:
        """Predicted over the measured median, - 1."""
        if self.predicted_s is None or self.median_s is None:
            return None
        return self.predicted_s / self.median_s - 1

    @property
    def core_error(self) -> float | None:
        """Of the core seconds: what others do on the machine changes them little."""
        if self.predicted_core_s is None or not self.measured_core_s:
            return None
        return self.predicted_core_s / self.measured_core_s - 1

    @property
    def spread(self) -> float | None:
        """Between the quartiles, over the median; None for fewer than four steps."""
        if len(self.measured_s) < 4:
            return None
        low, middle, high = statistics.quantiles(self.measured_s, n=4, method="inclusive")
        return (high - low) / middle


def step_seconds(ran: Ran) -> dict[int, float]:
    """Seconds from the vote before to its own, by step, of steps that no change came before or into."""
    changed = {change.step for change in ran.changes}
    return {
        after.step: after.end_s - before.end_s
        for before, after in pairwise(ran.steps)
        if after.step not in changed
    }


def layout_times(ran: Ran, predictions: Mapping[Sizes, StepPrediction]) -> tuple[LayoutTimes, ...]:
    """Of every layout that was foreseen or taken, in that order."""
    seconds = step_seconds(ran)
    order = dict.fromkeys((*predictions, *(step.sizes for step in ran.steps)))
    found = []
    for sizes in order:
        steps = [done.step for done in ran.steps if done.sizes == sizes and done.step in seconds]
        core_s = [ran.core_s[step] for step in steps if step in ran.core_s]
        foreseen = predictions.get(sizes)
        found.append(
            LayoutTimes(
                sizes=sizes,
                predicted_s=None if foreseen is None else foreseen.step_s,
                measured_s=tuple(seconds[step] for step in steps),
                predicted_core_s=None if foreseen is None else foreseen.core_s,
                measured_core_s=statistics.mean(core_s) if core_s else None,
            )
        )
    return tuple(found)


def forecast_table(
    name: str, forecast: Forecast, predictions: Mapping[Sizes, StepPrediction], samples: int
) -> Table:
    """One line per stretch of steps."""
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
    for stretch in forecast.stretches:
        found = predictions[stretch.layout.sizes]
        table.add_row(
            f"{stretch.first} to {stretch.end}",
            stretch.why,
            str(stretch.layout.num_nodes),
            sizes_text(stretch.layout.sizes),
            mebibytes(stretch.copied_bytes),
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


def detection_s(ran: Ran, change: "Reshaped") -> float | None:
    """From the first SIGKILL to the first sign of it; None where nobody was killed here."""
    killed_s = [ran.killed_s[node] for node in change.lost if node in ran.killed_s]
    return max(0.0, change.noticed_s - min(killed_s)) if killed_s else None


def next_step_s(ran: Ran, change: "Reshaped") -> float | None:
    """From readiness to the vote of the step after it; None where training ended or changed before."""
    ends_s = {done.step: done.end_s for done in ran.steps}
    last = {each.step: each for each in ran.changes}
    if change.step not in ends_s or last[change.step] is not change:
        return None
    return ends_s[change.step] - change.ready_s


def ran_record(ran: Ran, samples: int, times: Sequence[LayoutTimes]) -> dict[str, Any]:
    """All of it as JSON; times in seconds since the first sign of the start."""
    origin_s = ran.changes[0].noticed_s if ran.changes else 0.0
    seconds = step_seconds(ran)
    return {
        "steps": [
            {
                "step": done.step,
                "loss": done.loss,
                "end_s": done.end_s - origin_s,
                "seconds": seconds.get(done.step),
                "samples_per_s": samples / seconds[done.step] if done.step in seconds else None,
                "pipelines": list(done.sizes),
                "nodes": sum(done.sizes),
            }
            for done in ran.steps
        ],
        "changes": [
            {
                "step": change.step,
                "cause": str(change.cause),
                "lost": list(change.lost),
                "joined": list(change.joined),
                "attempts": change.attempts,
                "pipelines": list(change.sizes),
                "noticed_s": change.noticed_s - origin_s,
                "ready_s": change.ready_s - origin_s,
                "detection_s": detection_s(ran, change),
                "stopping_s": change.stopped_s - change.noticed_s,
                "planning_s": change.planning_s,
                "groups_s": change.groups_s,
                "copying_s": change.copying_s,
                "recovery_s": change.recovery_s,
                "next_step_s": next_step_s(ran, change),
                "num_bytes": change.num_bytes,
            }
            for change in ran.changes
        ],
        "layouts": [
            {
                "pipelines": list(found.sizes),
                "predicted_s": found.predicted_s,
                "measured_s": found.median_s,
                "error": found.error,
                "quartiles_apart": found.spread,
                "predicted_core_s": found.predicted_core_s,
                "measured_core_s": found.measured_core_s,
                "core_error": found.core_error,
                "num_steps": len(found.measured_s),
            }
            for found in times
        ],
        "cores": None if ran.cores is None else {"own": ran.cores.own, "others": ran.cores.others},
        "stopped": ran.refusal,
        "signal": None if ran.signal is None else ran.signal.name,
        "saved": None if ran.saved is None else str(ran.saved.folder),
    }


def forecast_record(forecast: Forecast, predictions: Mapping[Sizes, StepPrediction]) -> dict[str, Any]:
    """What was predicted, as JSON."""
    return {
        "stretches": [
            {
                "first": stretch.first,
                "end": stretch.end,
                "why": stretch.why,
                "copied_bytes": stretch.copied_bytes,
                "pipelines": [list(pipeline) for pipeline in stretch.layout.pipelines],
            }
            for stretch in forecast.stretches
        ],
        "refusal": forecast.refusal,
        "predictions": [
            {
                "pipelines": list(found.sizes),
                "simulated_s": found.simulated_s,
                "planning_s": found.planning_s,
                "feeding_s": found.feeding_s,
                "core_s": found.core_s,
                "step_s": found.step_s,
            }
            for found in predictions.values()
        ],
    }


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def sizes_text(sizes: Sizes) -> str:
    """2 + 3, and 3x1 + 2 for three of 1 beside one of 2."""
    runs = ((size, len(list(run))) for size, run in groupby(sizes))
    return " + ".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)
