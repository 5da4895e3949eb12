"""Blind rounds of multimodal models: jobs and plans, of which steps and peaks of memory are scored."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.harness.outcome import Evidence
from experiments.public import multimodal
from experiments.public.blind import (
    PEAK,
    STEP,
    Estimate,
    Prediction,
    Round,
    Row,
    errors,
    judged,
    rows_of,
    scores,
)
from workbench.cost.profile import load_profile
from workbench.units import GIB

DOES_NOT_FIT = ("oom", "fit", "out of memory")  # words in place of a figure


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, by run.

    Args:
        step_s: seconds of a step; the first of several figures.
        peak_gib: of a GPU; the smallest of several figures: allocated, not reserved.
        too_large: runs that did not fit.
    """

    step_s: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)
    too_large: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, rows: Mapping[str, Row], lines: Iterable[Row]) -> "Measured":
        """Read the lines of these rows; a line has a figure with its unit, a peak of memory, or both."""
        found = cls()
        for line in lines:
            if row := rows.get(line["id"]):
                found._add(row, *((line.get(name) or "").strip() for name in ("value", "unit", "peak_gib")))
        return found

    def _add(self, row: Row, value: str, unit: str, peak: str) -> None:
        name, peaks = row["id"], [float(peak)] if _is_number(peak) else []
        if not _is_number(value):
            if any(word in f"{value} {unit} {peak}".lower() for word in DOES_NOT_FIT):
                self.too_large.add(name)
        elif (gib := multimodal.measured_gib(float(value), unit)) is not None:
            peaks.append(gib)
        elif (seconds := multimodal.measured_s(row, float(value), unit)) is not None:
            self.step_s.setdefault(name, seconds)
        else:
            raise ValueError(f"run {name}: no seconds and no bytes are known of the unit {unit!r}")
        if peaks:
            self.peak_gib[name] = min(*peaks, self.peak_gib.get(name, peaks[0]))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalRound(Round[Row]):
    """Rows of multimodal models that are predicted and opened together.

    Args:
        inputs: CSV file of the rows.
        models: YAML file of their modules.
        trains: the rows' only kind of training, if any.
    """

    inputs: Path
    models: Path
    trains: str | None = None

    def runs(self) -> dict[str, Row]:
        """The rows that are judged, those that no job can say among them."""
        return {
            row["id"]: row
            for row in rows_of(self.inputs)
            if not row["why_not"] and self.trains in (None, row["trains"])
        }

    def predicted(self, run: Row) -> Prediction:
        """Step and peak that the row asks for."""
        if refused := run.get("unsaid"):
            return Prediction(refused=refused)
        job = multimodal.job_of(run, multimodal.models_of(self.models))
        try:
            step = None if run["covers"] == "memory" else multimodal.step_of(run, job)
            has_peak = multimodal.said(run, "memory") == "yes"
            return Prediction(step=step, peak=Estimate(multimodal.peak_gib(run, job)) if has_peak else None)
        except ValueError as error:
            return Prediction(refused=str(error))

    def logs(self) -> dict[str, list[float]]:
        """Group -> logarithms of measured over today's predicted seconds of a step."""
        asked = self.runs()
        took_s = Measured.read(asked, rows_of(self.measured)).step_s
        logs: dict[str, list[float]] = {}
        for name, seconds in took_s.items():
            if (step := self.predicted(asked[name]).step) is not None:
                logs.setdefault(asked[name]["project"], []).append(math.log(seconds / step.value))
        return logs

    def evidence(self) -> Evidence:
        """Errors of steps and peaks that were predicted before, and of today's as they would be written."""
        asked, before = self.runs(), self.before()
        rows = {name: row for name, row in asked.items() if not before[name].refused}
        measured = Measured.read(rows, rows_of(self.measured))
        groups = {name: row["project"] for name, row in rows.items()}
        today = {name: Prediction.read(self.predicted(row).cells()) for name, row in rows.items()}
        steps = judged(STEP, measured.step_s, groups, before, today)
        peaks = judged(PEAK, measured.peak_gib, groups, before, today)
        found = scores(steps, today=("mean", "signed", "inside_80_of_trainer")) | errors(steps)
        found |= scores(peaks, "memory_", today=("mean",)) | errors(peaks, "memory_")
        counts = {"predicted": float(len(rows)), "not_said": float(len(asked) - len(rows))}
        return Evidence(ours=found | _fits(rows, before, measured) | counts)


def _fits(rows: Mapping[str, Row], before: Mapping[str, Prediction], measured: Measured) -> dict[str, float]:
    """Rows of whose memory is known whether it fits: those that did not, and those rightly predicted."""
    known = measured.too_large | set(measured.peak_gib)
    peaks = {name: peak.value for name in known if (peak := before[name].peak)}
    has_gib = {name: load_profile(rows[name]["gpu"]).memory_bytes / GIB for name in peaks}
    too_large = {name for name, peak in peaks.items() if peak > has_gib[name]}
    return {
        "fits/rows": float(len(peaks)),
        "fits/too_large": float(len(measured.too_large & set(peaks))),
        "fits/right": float(sum((name in too_large) == (name in measured.too_large) for name in peaks)),
    }
