"""Result of an elastic training: predicted and measured steps, and a record of everything as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from runtime.elastic.forecast import Forecast, StepPrediction
from runtime.elastic.history import Reshaped, StepDone
from runtime.elastic.run import Ran

Sizes = tuple[int, ...]  # of the pipelines of a layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTimes:
    """Predicted and measured seconds of a step of one layout; None where one of them is missing.

    Args:
        measured_s: from vote to vote, without steps that follow or contain a change.
        predicted_core_s, measured_core_s: core seconds of all ranks and the supervisor, mean over the same
            steps.
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
        """Relative error of the prediction, against the measured median."""
        if self.predicted_s is None or self.median_s is None:
            return None
        return self.predicted_s / self.median_s - 1

    @property
    def core_error(self) -> float | None:
        """Relative error of the core seconds, which other load on the machine affects little."""
        if self.predicted_core_s is None or not self.measured_core_s:
            return None
        return self.predicted_core_s / self.measured_core_s - 1

    @property
    def spread(self) -> float | None:
        """Interquartile range over the median; None for fewer than four steps."""
        if len(self.measured_s) < 4:
            return None
        low, middle, high = statistics.quantiles(self.measured_s, n=4, method="inclusive")
        return (high - low) / middle


def step_seconds(ran: Ran) -> dict[int, float]:
    """Step -> seconds from the previous vote to its own, for steps that do not follow or contain a change."""
    changed = {change.step for change in ran.changes}
    return {
        after.step: after.end_s - before.end_s
        for before, after in pairwise(ran.steps)
        if after.step not in changed
    }


def layout_times(ran: Ran, predictions: Mapping[Sizes, StepPrediction]) -> tuple[LayoutTimes, ...]:
    """Times of every layout, predicted ones first, then others that occurred."""
    seconds = step_seconds(ran)
    order = dict.fromkeys((*predictions, *(step.sizes for step in ran.steps)))
    times = []
    for sizes in order:
        steps = [done.step for done in ran.steps if done.sizes == sizes and done.step in seconds]
        core_s = [ran.core_s[step] for step in steps if step in ran.core_s]
        prediction = predictions.get(sizes)
        times.append(
            LayoutTimes(
                sizes=sizes,
                predicted_s=None if prediction is None else prediction.step_s,
                measured_s=tuple(seconds[step] for step in steps),
                predicted_core_s=None if prediction is None else prediction.core_s,
                measured_core_s=statistics.mean(core_s) if core_s else None,
            )
        )
    return tuple(times)


def detection_s(ran: Ran, change: Reshaped) -> float | None:
    """Seconds from the first SIGKILL until it is noticed; None where no node was killed here."""
    killed_s = [ran.killed_s[node] for node in change.lost if node in ran.killed_s]
    return max(0.0, change.noticed_s - min(killed_s)) if killed_s else None


def next_step_s(ran: Ran, change: Reshaped) -> float | None:
    """Seconds from readiness to the next step's vote; None where training ended or changed before."""
    ends_s = {done.step: done.end_s for done in ran.steps}
    last = {later.step: later for later in ran.changes}
    if change.step not in ends_s or last[change.step] is not change:
        return None
    return ends_s[change.step] - change.ready_s


def ran_record(ran: Ran, samples: int, times: Sequence[LayoutTimes]) -> dict[str, Any]:
    """Record of the training as JSON; times in seconds since the start was first noticed."""
    origin_s = ran.changes[0].noticed_s if ran.changes else 0.0
    seconds = step_seconds(ran)
    return {
        "steps": [_step_record(done, origin_s, seconds.get(done.step), samples) for done in ran.steps],
        "changes": [_change_record(ran, change, origin_s) for change in ran.changes],
        "layouts": [_layout_record(layout) for layout in times],
        "cores": None if ran.cores is None else {"own": ran.cores.own, "others": ran.cores.others},
        "stopped": ran.refusal,
        "signal": None if ran.signal is None else ran.signal.name,
        "saved": None if ran.saved is None else str(ran.saved.folder),
    }


def _step_record(done: StepDone, origin_s: float, seconds: float | None, samples: int) -> dict[str, Any]:
    return {
        "step": done.step,
        "loss": done.loss,
        "end_s": done.end_s - origin_s,
        "seconds": seconds,
        "samples_per_s": None if seconds is None else samples / seconds,
        "pipelines": list(done.sizes),
        "nodes": sum(done.sizes),
    }


def _change_record(ran: Ran, change: Reshaped, origin_s: float) -> dict[str, Any]:
    return {
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
        "prepared": change.is_prepared,
        "groups_s": change.groups_s,
        "copying_s": change.copying_s,
        "recovery_s": change.recovery_s,
        "next_step_s": next_step_s(ran, change),
        "num_bytes": change.num_bytes,
    }


def _layout_record(layout: LayoutTimes) -> dict[str, Any]:
    return {
        "pipelines": list(layout.sizes),
        "predicted_s": layout.predicted_s,
        "measured_s": layout.median_s,
        "error": layout.error,
        "quartiles_apart": layout.spread,
        "predicted_core_s": layout.predicted_core_s,
        "measured_core_s": layout.measured_core_s,
        "core_error": layout.core_error,
        "num_steps": len(layout.measured_s),
    }


def forecast_record(forecast: Forecast, predictions: Mapping[Sizes, StepPrediction]) -> dict[str, Any]:
    """Record of the forecast as JSON."""
    return {
        "stretches": [
            {
                "first": interval.first,
                "end": interval.end,
                "why": interval.why,
                "copied_bytes": interval.copied_bytes,
                "pipelines": [list(pipeline) for pipeline in interval.layout.pipelines],
            }
            for interval in forecast.intervals
        ],
        "refusal": forecast.refusal,
        "predictions": [
            {
                "pipelines": list(prediction.sizes),
                "simulated_s": prediction.simulated_s,
                "planning_s": prediction.planning_s,
                "feeding_s": prediction.feeding_s,
                "core_s": prediction.core_s,
                "step_s": prediction.step_s,
            }
            for prediction in predictions.values()
        ],
    }
