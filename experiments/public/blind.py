"""A blind round: published runs that are predicted before anybody here has seen their figures.

Inputs come from pages and recipes; predictions are committed while measured figures are kept apart, unopened.
A round says which runs it has, how one is predicted and what is scored (`experiments.public.text_round`,
`experiments.public.multimodal_round`). A script declares its files, such as `experiments.public.unseen`:
a further round is such a declaration.
"""

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from experiments.harness.command import command_line
from experiments.harness.script import Script, finished
from workbench.whole_file import write_text

FOLDER = Path(__file__).parent / "data" / "unseen"
INTERVALS = {
    "inside_80": ("low_s", "high_s"),
    "inside_80_of_system": ("system_low_s", "system_high_s"),
    "inside_80_of_trainer": ("trainer_low_s", "trainer_high_s"),
}
COLUMNS = ("id", "predicted_s", *(end for ends in INTERVALS.values() for end in ends), "peak_gib", "refused")

STEP = attrgetter("step")  # of a `Prediction`
PEAK = attrgetter("peak")

R = TypeVar("R")
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted figure, with both ends of its intervals by their names in `INTERVALS`."""

    value: float
    ends: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted of a run: seconds of its step, GiB of its fullest GPU, or why neither is."""

    step: Estimate | None = None
    peak: Estimate | None = None
    refused: str = ""

    def cells(self) -> dict[str, str]:
        """The cells of `COLUMNS`, but for the id."""
        cells = dict.fromkeys(COLUMNS[1:], "") | {"refused": self.refused}
        if self.step is not None:
            cells["predicted_s"] = f"{self.step.value:.6g}"
            for name, ends in self.step.ends.items():
                cells |= {column: f"{end:.6g}" for column, end in zip(INTERVALS[name], ends, strict=True)}
        return cells if self.peak is None else cells | {"peak_gib": f"{self.peak.value:.6g}"}

    @classmethod
    def read(cls, cells: Row) -> "Prediction":
        """Read cells, of which a round may have some alone."""
        if cells.get("refused"):
            return cls(refused=cells["refused"])
        step, peak = cells.get("predicted_s"), cells.get("peak_gib")
        with_ends = {name: ends for name, ends in INTERVALS.items() if cells.get(ends[0])}
        ends = {name: (float(cells[low]), float(cells[high])) for name, (low, high) in with_ends.items()}
        of_peak = Estimate(float(peak)) if peak else None
        return cls(step=Estimate(float(step), ends) if step else None, peak=of_peak)


@dataclass(frozen=True, slots=True)
class Scored:
    """A measured figure of a run, under its group and id, with what was and what today is predicted of it."""

    group: str
    name: str
    measured: float
    before: Estimate
    today: Estimate

    @property
    def error(self) -> float:
        """Relative error of the prediction from before; above zero: too slow, or too much."""
        return self.before.value / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(ABC, Generic[R]):
    """Runs that are predicted and opened together.

    Args:
        predictions: CSV file of what was predicted before.
        measured: CSV file of what was measured.
    """

    predictions: Path
    measured: Path

    @abstractmethod
    def runs(self) -> Mapping[str, R]:
        """The runs to predict, by id."""

    @abstractmethod
    def predicted(self, run: R) -> Prediction:
        """What is predicted of a run today."""

    def seal(self) -> None:
        """Write the predictions of all runs; ValueError if one of them has been measured already."""
        runs = self.runs()
        opened = {row["id"] for row in rows_of(self.measured)} if self.measured.exists() else set()
        if seen := [name for name in runs if name in opened]:
            raise ValueError(f"{self.measured.name} has {seen[0]}: predictions are written before it")
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({"id": name} | self.predicted(run).cells() for name, run in runs.items())
        write_text(text.getvalue(), self.predictions)

    def before(self) -> dict[str, Prediction]:
        """The predictions that were sealed, by run."""
        return {row["id"]: Prediction.read(row) for row in rows_of(self.predictions)}


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def judged(
    part: Callable[[Prediction], Estimate | None],
    measured: Mapping[str, float],
    groups: Mapping[str, str],
    before: Mapping[str, Prediction],
    today: Mapping[str, Prediction],
) -> list[Scored]:
    """The part of every measured run that was predicted before; ValueError if one is refused today."""
    found = []
    for name, value in measured.items():
        if (then := part(before[name])) is not None:
            if (now := part(today[name])) is None:
                raise ValueError(f"run {name}: predicted before, today refused: {today[name].refused}")
            found.append(Scored(groups[name], name, value, then, now))
    return found


def scores(runs: Sequence[Scored], quantity: str = "", *, today: Sequence[str]) -> dict[str, float]:
    """Figures of all runs and of each group.

    Args:
        runs: may be none.
        quantity: begins the figures' names.
        today: figures that are given of today's predictions, too.
    """
    found = scores_of("all", runs, quantity, today=today)
    for name in dict.fromkeys(run.group for run in runs):
        found |= scores_of(name, [run for run in runs if run.group == name], quantity, today=today)
    return found


def scores_of(
    name: str, runs: Sequence[Scored], quantity: str = "", *, today: Sequence[str]
) -> dict[str, float]:
    """Figures of a part of the runs under its name, as in `scores`."""
    if not runs:
        return {}
    found = figures([(run.before, run.measured) for run in runs])
    newer = figures([(run.today, run.measured) for run in runs])
    found |= {f"{key}_today": newer[key] for key in today}
    return {f"{name}/{quantity}{key}": value for key, value in found.items()}


def errors(runs: Sequence[Scored], quantity: str = "") -> dict[str, float]:
    """The error of each run under its group."""
    return {f"{run.group}/{run.name}/{quantity}error": run.error for run in runs}


def figures(pairs: Sequence[tuple[Estimate, float]]) -> dict[str, float]:
    """Errors of predictions against what was measured, and the share of it inside each interval."""
    off = np.array([estimate.value / measured - 1 for estimate, measured in pairs])
    found = {
        "rows": float(len(pairs)),
        "mean": float(np.abs(off).mean()),
        "median": float(np.median(np.abs(off))),
        "signed": float(off.mean()),
        "worst": float(np.abs(off).max()),
    }
    for name in pairs[0][0].ends:
        ends = ((*estimate.ends[name], measured) for estimate, measured in pairs)
        found[name] = float(np.mean([low <= measured <= high for low, high, measured in ends]))
    return found


def predicting(sealed: Round[R]) -> Callable[[Script], int]:
    """The command of a round's script: `--predict` seals its predictions instead of comparing them."""

    def main(run: Script) -> int:
        parser = command_line(run.about)
        parser.add_argument("--predict", action="store_true", help="write predictions, before measurements")
        arguments = parser.parse_args()
        if not arguments.predict:
            return finished(run(), as_json=arguments.json)
        try:
            sealed.seal()
        except ValueError as error:
            parser.error(str(error))
        return 0

    return main
