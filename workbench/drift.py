"""Drift of a machine's speed since its calibration, and prediction errors corrected for it.

A yardstick, a fixed piece of work, is timed while calibrating and beside every executed step. Drift is its
time beside the step over that of the calibration, minus 1. Nothing in a plan explains it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean, median

from workbench.trace import Trace

YARDSTICK = (
    "yardstick_s"  # a detail of traces: the calibration's in simulated ones, a reading in executed ones
)
MOST_DRIFT = 0.10  # beyond it a calibration is no longer valid
REACH = 3  # neighbouring runs on either side whose readings count for a run too


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive executed steps of a plan with their prediction.

    Args:
        predicted_s: seconds of a step by the calibration in force.
        executed_s: seconds of every step.
        drift: of the machine since that calibration; None where not read.
    """

    predicted_s: float
    executed_s: tuple[float, ...]
    drift: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted:
    """Errors of a plan's predictions against its runs, with and without drift.

    Args:
        drift: fraction by which the machine ran slower than when calibrated, mean over the steps; None where
            not read.
        error: predicted over the executed median, minus 1.
        error_corrected: the same of predictions times 1 + drift; None without drift.
    """

    drift: float | None
    error: float
    error_corrected: float | None


def yardstick_s(trace: Trace) -> float | None:
    """Seconds of the yardstick in a trace; None where it has none."""
    return next((float(value) for name, value in trace.details if name == YARDSTICK), None)


def drift_of(calibrated_s: float | None, readings_s: Sequence[float | None]) -> float | None:
    """Mean drift of yardstick readings, as a fraction; None where calibration or readings are missing.

    Readings last equally long whatever the speed, so speeds are averaged: the harmonic mean.
    """
    known = [reading for reading in readings_s if reading is not None]
    return harmonic_mean(known) / calibrated_s - 1 if calibrated_s and known else None


def drift_between(simulated: Trace, executed: Sequence[Trace]) -> float | None:
    """Drift of executed steps since the calibration behind the simulated one."""
    return drift_of(yardstick_s(simulated), [yardstick_s(trace) for trace in executed])


def smoothed(
    calibrated_s: Sequence[float | None], readings_s: Sequence[Sequence[float | None]]
) -> list[float | None]:
    """[R] drift of consecutive runs, by their own readings and their neighbours'.

    A reading lasts some milliseconds, so that a burst of other work distorts it by chance.

    Args:
        calibrated_s: [R] the yardstick of the calibration in force.
        readings_s: [R] the readings beside the steps of a run.
    """
    return [
        drift_of(
            calibrated_s[run], [r for near in readings_s[max(0, run - REACH) : run + REACH + 1] for r in near]
        )
        for run in range(len(readings_s))
    ]


def drifted(runs: Sequence[Run]) -> Drifted:
    """The errors of a plan's predictions, which a calibration between its runs may have changed.

    Executed seconds are scaled to the first prediction, so that their median is meaningful.

    Raises:
        ValueError: no step was executed, or one took no time.
    """
    steps = [(run.predicted_s, step_s, run.drift) for run in runs for step_s in run.executed_s]
    if not steps or min(step_s for _, step_s, _ in steps) <= 0:
        raise ValueError("drift: want executed steps of more than 0 s")
    drifts = [drift for *_, drift in steps if drift is not None]
    is_known = len(drifts) == len(steps)
    return Drifted(
        drift=fmean(drifts) if is_known else None,
        error=_error([(predicted_s, step_s) for predicted_s, step_s, _ in steps]),
        error_corrected=_error([(p * (1 + (d or 0.0)), step_s) for p, step_s, d in steps])
        if is_known
        else None,
    )


def _error(steps: Sequence[tuple[float, float]]) -> float:
    first_s = steps[0][0]
    if not first_s:
        return -1.0
    return first_s / median(step_s * (first_s / predicted_s) for predicted_s, step_s in steps) - 1


def is_beyond(drift: float | None) -> bool:
    """Whether the calibration is no longer valid."""
    return drift is not None and abs(drift) > MOST_DRIFT


def drift_warning(drift: float | None) -> str | None:
    """A warning where the drift is beyond its limit; None where it is not."""
    if drift is None or not is_beyond(drift):
        return None
    speed = "slower" if drift > 0 else "faster"
    return (
        f"DRIFT: the machine ran {abs(drift):.1%} {speed} than when it was calibrated; errors come "
        "from the machine as much as from the prediction: calibrate again, or use the corrected errors"
    )
