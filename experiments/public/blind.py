"""Published runs of language models that are predicted before their times are seen.

A row's cells come from pages and recipes; predictions are committed while
measurements are kept apart, unopened.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.harness.command import command_line
from experiments.harness.outcome import Evidence
from experiments.harness.script import Script, finished
from sim.predict import iteration_s
from workbench.llm_table.columns import check_header, read_row
from workbench.llm_table.frameworks import filled
from workbench.llm_table.llm_row import Recomputed
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_interval import unsaid_of
from workbench.whole_file import write_text

FOLDER = Path(__file__).parent / "data" / "unseen"
OWN = ("id",)  # columns that are not those of `workbench predict`


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run, without what it took.

    Args:
        group: its system.
        name: its `id`.
        cells: the input of `workbench predict`, with blanks filled.
        schedules: pipelines that fill and drain in one iteration.
        full_share: share of the way from the cells' recomputation to a full one.
        why_not: why it is not judged; empty: it is.
        unsaid: as `workbench predict` widens intervals by it.
    """

    group: str
    name: str
    cells: Mapping[str, str]
    schedules: int
    full_share: float
    why_not: str
    unsaid: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of an iteration with the ends of their 80 % interval, or why there are none."""

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Runs that were predicted and opened together.

    Args:
        files: CSV files of rows, without their suffix; a row's `x_system` or else its file is its group.
        predictions: file of the predictions from before.
        measured: file of the measured seconds.
    """

    files: tuple[str, ...]
    predictions: Path
    measured: Path

    def runs(self) -> Iterator[Run]:
        """Yield every run, in the files' order."""
        for file in self.files:
            for printed in rows_of(FOLDER / f"{file}.csv"):
                cells = {name: value for name, value in printed.items() if name not in OWN}
                yield Run(
                    group=printed.get("x_system") or file,
                    name=printed["id"],
                    cells={name: value for name, value in filled(cells).items() if value},
                    schedules=int(printed.get("x_schedules") or 1),
                    full_share=float(printed.get("x_full_share") or 0.0),
                    why_not=printed["x_why_not"],
                    unsaid=unsaid_of(cells),
                )

    def write_predictions(self) -> None:
        """Write the prediction of every run; ValueError if there are measurements beside it already."""
        check_unmeasured(self.measured)
        predictor = RowPredictor(iteration_s)
        lines = ["id,predicted_s,low_s,high_s,refused"]
        for run in self.runs():
            seconds = predicted(run, predictor)
            numbers = (f"{each:.6g}" for each in (seconds.value, seconds.low, seconds.high))
            lines.append(f'{run.name},{",".join(numbers)},"{seconds.refused}"')
        write_text("\n".join(lines) + "\n", self.predictions)

    def written(self) -> dict[str, Seconds]:
        """The predictions that were committed before measurements were seen, by run."""
        return {
            row["id"]: Seconds(
                float(row["predicted_s"]), float(row["low_s"]), float(row["high_s"]), row["refused"]
            )
            for row in rows_of(self.predictions)
        }

    def took_s(self) -> dict[str, float]:
        """Measured seconds of an iteration, by run."""
        return {row["id"]: float(row["measured_s"]) for row in rows_of(self.measured) if row["measured_s"]}

    def logs(self) -> dict[str, list[float]]:
        """Group -> logarithms of measured over today's predicted seconds of judged runs within the peak."""
        took_s, predictor = self.took_s(), RowPredictor(iteration_s)
        logs: dict[str, list[float]] = {}
        for run in self.runs():
            seconds = predicted(run, predictor)
            if run.why_not or run.name not in took_s or seconds.refused:
                continue
            if peak_share(run, took_s[run.name], predictor) <= 1.0:
                logs.setdefault(run.group, []).append(math.log(took_s[run.name] / seconds.value))
        return logs

    def evidence(self) -> Evidence:
        """Errors of the predictions that were written before, and of today's: of all runs and by group.

        `possible`: without runs that would have exceeded their GPUs' peak, if there are some.
        """
        took_s, before, evidence = self.took_s(), self.written(), Evidence()
        predictor = RowPredictor(iteration_s)
        every = list(self.runs())
        judged = [
            one for one in every if not one.why_not and one.name in took_s and not before[one.name].refused
        ]
        groups = dict.fromkeys(one.group for one in judged)
        parts = {"all": judged} | {name: [one for one in judged if one.group == name] for name in groups}
        possible = [one for one in judged if peak_share(one, took_s[one.name], predictor) <= 1.0]
        if len(possible) < len(judged):
            parts["possible"] = possible
        today_of = {one.name: predicted(one, predictor) for one in judged}
        for name, part in parts.items():
            found = figures([(before[one.name], took_s[one.name]) for one in part])
            today = figures([(today_of[one.name], took_s[one.name]) for one in part])
            evidence.ours |= {f"{name}/{key}": value for key, value in found.items()}
            evidence.ours |= {f"{name}/{key}_today": today[key] for key in ("mean", "signed", "inside_80")}
        for one in judged:
            evidence.ours[f"{one.group}/{one.name}/error"] = before[one.name].value / took_s[one.name] - 1
        evidence.ours["not_judged"] = float(len(every) - len(judged))
        return evidence


def predicted(run: Run, predictor: RowPredictor) -> Seconds:
    """The prediction of a run, as `workbench predict` makes it."""
    shares = {run.cells.get("recompute", "none"): 1.0 - run.full_share}
    if run.full_share:
        shares["full"] = run.full_share
    sums = np.zeros(3)
    for recompute, share in shares.items():
        cells = {**run.cells, "recompute": recompute}
        try:
            check_header(tuple(cells))
            prediction = predictor.predict(read_row(cells), run.unsaid)
        except ValueError as error:
            return Seconds(refused=str(error))
        ends = prediction.interval.low_s, prediction.interval.high_s
        sums += share * run.schedules * np.array((prediction.iteration_s, *ends))
    value, low, high = map(float, sums)
    return Seconds(value, low, high)


def peak_share(run: Run, took_s: float, predictor: RowPredictor) -> float:
    """FLOP/s of a run over its GPUs' peak, by its cells and what it took; above 1: the cells are wrong."""
    row = read_row(run.cells)
    recomputed = 4 / 3 if row.recompute is Recomputed.FULL else 1.0
    prediction = predictor.predict(row, run.unsaid)
    return recomputed * run.schedules * prediction.mfu * prediction.iteration_s / took_s


def check_unmeasured(measurements: Path) -> None:
    """Raise ValueError if measurements are there already."""
    if measurements.exists():
        raise ValueError(f"{measurements.name} is there: predictions are written before it")


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def figures(pairs: Sequence[tuple[Seconds, float]]) -> dict[str, float]:
    """Errors of predictions against measured seconds."""
    errors = np.array([seconds.value / took_s - 1 for seconds, took_s in pairs])
    inside = [seconds.low <= took_s <= seconds.high for seconds, took_s in pairs]
    return {
        "rows": float(len(pairs)),
        "mean": float(np.abs(errors).mean()),
        "median": float(np.median(np.abs(errors))),
        "signed": float(errors.mean()),
        "worst": float(np.abs(errors).max()),
        "inside_80": float(np.mean(inside)),
    }


def predicting(write: Callable[[], None]) -> Callable[[Script], int]:
    """The command of a script with predictions: `--predict` writes them instead of comparing them."""

    def main(run: Script) -> int:
        parser = command_line(run.about)
        parser.add_argument("--predict", action="store_true", help="write predictions, before measurements")
        arguments = parser.parse_args()
        if not arguments.predict:
            return finished(run(), as_json=arguments.json)
        try:
            write()
        except ValueError as error:
            parser.error(str(error))
        return 0

    return main
