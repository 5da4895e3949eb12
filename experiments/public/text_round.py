"""Blind rounds of language models: rows of `workbench predict`, priced as that command does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.harness.outcome import Evidence
from experiments.public.blind import (
    FOLDER,
    STEP,
    Estimate,
    Prediction,
    Round,
    errors,
    judged,
    rows_of,
    scores,
    scores_of,
)
from sim.predict import iteration_s
from workbench.llm_table.columns import check_header, read_row
from workbench.llm_table.frameworks import filled
from workbench.llm_table.llm_row import Recomputed
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_interval import unsaid_of

TODAY = ("mean", "signed", "inside_80")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run, without what it took.

    Args:
        group: its system.
        cells: the input of `workbench predict`, with blanks filled.
        schedules: pipelines that fill and drain in one iteration.
        full_share: share of the way from the cells' recomputation to a full one.
        why_not: why it is not judged; empty: it is.
        unsaid: as `workbench predict` widens intervals by it.
    """

    group: str
    cells: Mapping[str, str]
    schedules: int
    full_share: float
    why_not: str
    unsaid: Mapping[str, float]

    def predicted(self) -> Prediction:
        """The prediction, as `workbench predict` makes it."""
        shares = {self.cells.get("recompute", "none"): 1.0 - self.full_share}
        if self.full_share:
            shares["full"] = self.full_share
        sums = np.zeros(3)
        for recompute, share in shares.items():
            cells = {**self.cells, "recompute": recompute}
            try:
                check_header(tuple(cells))
                prediction = predictor().predict(read_row(cells), self.unsaid)
            except ValueError as error:
                return Prediction(refused=str(error))
            ends = prediction.interval.low_s, prediction.interval.high_s
            sums += share * self.schedules * np.array((prediction.iteration_s, *ends))
        value, low, high = map(float, sums)
        return Prediction(step=Estimate(value, {"inside_80": (low, high)}))

    def peak_share(self, took_s: float) -> float:
        """FLOP/s over its GPUs' peak, by its cells and what it took; above 1: the cells are wrong."""
        row = read_row(self.cells)
        recomputed = 4 / 3 if row.recompute is Recomputed.FULL else 1.0
        prediction = predictor().predict(row, self.unsaid)
        return recomputed * self.schedules * prediction.mfu * prediction.iteration_s / took_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRound(Round[Run]):
    """Rows of language models that are predicted and opened together.

    Args:
        files: their CSV files, without suffix; a row's `x_system` or else its file is its group.
    """

    files: tuple[str, ...]

    def runs(self) -> dict[str, Run]:
        """Every run by its id, in the files' order."""
        return {row["id"]: _run(row, file) for file in self.files for row in rows_of(FOLDER / f"{file}.csv")}

    def predicted(self, run: Run) -> Prediction:
        """As `workbench predict` does."""
        return run.predicted()

    def took_s(self) -> dict[str, float]:
        """Measured seconds of an iteration, by run."""
        return {row["id"]: float(row["measured_s"]) for row in rows_of(self.measured) if row["measured_s"]}

    def logs(self) -> dict[str, list[float]]:
        """Group -> logarithms of measured over today's predicted seconds of judged runs within the peak."""
        took_s = self.took_s()
        logs: dict[str, list[float]] = {}
        for name, run in self.runs().items():
            step = None if run.why_not or name not in took_s else run.predicted().step
            if step is not None and run.peak_share(took_s[name]) <= 1.0:
                logs.setdefault(run.group, []).append(math.log(took_s[name] / step.value))
        return logs

    def evidence(self) -> Evidence:
        """Errors of the predictions that were written before, and of today's: of all runs and by group.

        `possible`: without runs that would have exceeded their GPUs' peak, if there are some.
        """
        took_s, before, runs = self.took_s(), self.before(), self.runs()
        asked = [name for name, run in runs.items() if not run.why_not and name in took_s]
        measured = {name: took_s[name] for name in asked if not before[name].refused}
        today = {name: runs[name].predicted() for name in measured}
        scored = judged(STEP, measured, {name: run.group for name, run in runs.items()}, before, today)
        found = scores(scored, today=TODAY) | errors(scored)
        possible = [one for one in scored if runs[one.name].peak_share(one.measured) <= 1.0]
        if len(possible) < len(scored):
            found |= scores_of("possible", possible, today=TODAY)
        return Evidence(ours=found | {"not_judged": float(len(runs) - len(scored))})


def _run(row: Mapping[str, str], file: str) -> Run:
    cells = {name: value for name, value in row.items() if name != "id"}
    return Run(
        group=row.get("x_system") or file,
        cells={name: value for name, value in filled(cells).items() if value},
        schedules=int(row.get("x_schedules") or 1),
        full_share=float(row.get("x_full_share") or 0.0),
        why_not=row["x_why_not"],
        unsaid=unsaid_of(cells),
    )


@cache
def predictor() -> RowPredictor:
    """The predictor of all rows."""
    return RowPredictor(iteration_s)
