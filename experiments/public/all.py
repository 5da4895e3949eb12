"""Every published training run that the project carries, predicted as `workbench predict` does.

Source:  experiments/public/data, nine files of eight projects; `workbench/llm_table/frameworks.toml` fills
         what a page leaves blank by one rule a framework.
Ours:    the path of `workbench predict` with the shipped defaults: plan, lowering, price, sweep. Of these,
         the numbers fitted to a framework (`experiments.public.fitted` says how they do on rows that they
         were not fitted to) are left out for `mape_unfitted`.
Setup:   an error is the relative difference from what the page prints, seconds where it prints a
         throughput; above zero: predicted too slow. Refused are rows that `predict` has no words or no
         device for; unscorable are those without cells, counted apart.
Run:     python -m experiments.public.all [--json]
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter

import numpy as np
from scipy.stats import kendalltau

from experiments.harness.command import command_line
from experiments.harness.outcome import Evidence
from experiments.harness.record import RESULTS, results_folder
from experiments.harness.script import Parts, Script, finished, script
from experiments.public.published import Published, published
from sim.predict import iteration_s
from workbench.llm_table.columns import check_header, read_row
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import RowPredictor
from workbench.whole_file import write_text

GOAL = 0.08
ROWS = RESULTS / "public_all_rows.jsonl"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row and what became of it: an error, or the reason why there is none."""

    row: Published
    iteration_s: float | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    refused: str | None = None
    took_s: float = 0.0

    @property
    def error(self) -> float | None:
        return None if self.iteration_s is None else self.row.error(self.iteration_s)

    @property
    def is_inside(self) -> bool:
        """Whether what was printed lies inside the interval."""
        ends = self.row.predicted(self.low_s), self.row.predicted(self.high_s)
        return min(ends) <= self.row.measured <= max(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Of the rows of one data set.

    Args:
        mape, median, p90, worst: of the absolute relative error.
        signed: mean error; above zero: predicted too slow.
        kendall_tau: between predicted and printed, in one unit; None for fewer than two rows.
        coverage_80: share of rows inside their 80 % interval.
        width_80: median width of these over the prediction.
        rows: scored.
        refused: not priced, for want of words or of a device.
        unscorable: without cells.
    """

    mape: float | None
    median: float | None
    signed: float | None
    p90: float | None
    worst: float | None
    kendall_tau: float | None
    coverage_80: float | None
    width_80: float | None
    rows: int
    refused: int
    unscorable: int


def scored(rows: Iterable[Published]) -> tuple[Scored, ...]:
    """Every row through the path of `workbench predict`."""
    predictor = RowPredictor(iteration_s)
    return tuple(_scored(row, predictor) for row in rows)


def unfitted(found: Iterable[Scored]) -> tuple[Scored, ...]:
    """The same without numbers that were fitted to a framework; the others as they are."""
    predictor = RowPredictor(iteration_s)
    return tuple(
        _scored(each.row, predictor, lambda row: replace(row, fitted=()))
        if each.iteration_s is not None and read_row(each.row.cells).fitted
        else each
        for each in found
    )


def _scored(
    row: Published, predictor: RowPredictor, change: Callable[[LlmRow], LlmRow] = lambda row: row
) -> Scored:
    if row.unscorable is not None:
        return Scored(row=row)
    began_s = perf_counter()
    try:
        check_header(tuple(row.cells))
        found = predictor.predict(change(read_row(row.cells)), row.unsaid)
    except ValueError as error:
        return Scored(row=row, refused=str(error))
    return Scored(
        row=row,
        iteration_s=found.iteration_s,
        low_s=found.interval.low_s,
        high_s=found.interval.high_s,
        took_s=perf_counter() - began_s,
    )


def score(found: Sequence[Scored]) -> Score:
    """Of some rows, of one unit or several."""
    priced = [(each, each.iteration_s) for each in found if each.iteration_s is not None]
    errors = np.array([each.row.error(seconds) for each, seconds in priced])
    size = np.abs(errors)
    has_rows = len(priced) > 0
    return Score(
        mape=float(size.mean()) if has_rows else None,
        median=float(np.median(size)) if has_rows else None,
        signed=float(errors.mean()) if has_rows else None,
        p90=float(np.quantile(size, 0.9)) if has_rows else None,
        worst=float(size.max()) if has_rows else None,
        kendall_tau=_kendall(priced),
        coverage_80=float(np.mean([each.is_inside for each, _ in priced])) if has_rows else None,
        width_80=_width(priced),
        rows=len(priced),
        refused=sum(each.refused is not None for each in found),
        unscorable=sum(each.row.unscorable is not None for each in found),
    )


def _width(priced: Sequence[tuple[Scored, float]]) -> float | None:
    widths = [(each.high_s - each.low_s) / seconds for each, seconds in priced]
    return float(np.median(widths)) if widths else None


def _kendall(priced: Sequence[tuple[Scored, float]]) -> float | None:
    if len({each.row.target for each, _ in priced}) != 1 or len(priced) < 2:
        return None
    predicted = [each.row.predicted(seconds) for each, seconds in priced]
    tau = kendalltau(predicted, [each.row.measured for each, _ in priced]).statistic
    return float(tau) if np.isfinite(tau) else None


def scores(found: Sequence[Scored]) -> dict[str, Score]:
    """By data set, and of all rows."""
    names = dict.fromkeys(each.row.data_set for each in found)
    by_name = {name: score([each for each in found if each.row.data_set == name]) for name in names}
    return by_name | {ALL: score(found)}


def _record(each: Scored) -> dict[str, object]:
    row = each.row
    return {
        "data_set": row.data_set,
        "line": row.line,
        "model": row.model,
        "gpu": row.cells.get("gpu"),
        "gpus": row.cells.get("gpus"),
        "target": row.target,
        "measured": row.measured,
        "predicted": None if each.iteration_s is None else row.predicted(each.iteration_s),
        "error": each.error,
        "interval_s": None if each.iteration_s is None else [each.low_s, each.high_s],
        "refused": each.refused,
        "unscorable": row.unscorable,
        "took_s": round(each.took_s, 3),
    }


def _line(name: str, each: Score) -> str:
    said = f"{name}: {each.rows} rows, {each.refused} refused, {each.unscorable} unscorable"
    if each.mape is None or each.median is None or each.p90 is None or each.worst is None:
        return said
    tau = "none" if each.kendall_tau is None else f"{each.kendall_tau:.3f}"
    return (
        f"{said}; mean {each.mape:.1%}, median {each.median:.1%}, signed {each.signed:+.1%}, "
        f"p90 {each.p90:.1%}, worst {each.worst:.1%}, tau {tau}, {each.coverage_80:.0%} inside their 80 % "
        f"interval, {each.width_80:.0%} wide in the median"
    )


def _reasons(found: Sequence[Scored]) -> list[str]:
    """Each reason for a row without a price once, with how many rows have it."""
    counts: dict[str, int] = {}
    for each in found:
        for kind, reason in (("refused", each.refused), ("unscorable", each.row.unscorable)):
            if reason is not None:
                told = f"{kind}: {each.row.data_set}: {reason}"
                counts[told] = counts.get(told, 0) + 1
    return [f"{told} ({count} rows)" for told, count in counts.items()]


def main(run: Script) -> int:
    """As of all scripts; `--json` also prints every data set's score, null where there is none."""
    arguments = command_line(__doc__).parse_args()
    found = run()
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    data_sets = {
        name: {key: found.ours.get(f"{name}/{key}") for key in Score.__dataclass_fields__}
        for name in (*dict.fromkeys(row["data_set"] for row in rows), ALL)
    }
    return finished(found, as_json=arguments.json, more={"data_sets": data_sets})


@script(command=main)
def run() -> Parts:
    """Price every row, keep what became of each, and count the errors."""
    found = scored(published())
    write_text("".join(json.dumps(_record(each)) + "\n" for each in found), results_folder() / ROWS.name)
    by_name = scores(found)
    plain = scores(unfitted(found))
    ours = {
        f"{name}/{key}": float(value)
        for name, each in by_name.items()
        for key, value in asdict(each).items()
        if value is not None
    }
    ours |= {f"{name}/mape_unfitted": each.mape for name, each in plain.items() if each.mape is not None}
    evidence = Evidence(ours=ours)
    for name, each in by_name.items():
        if name != ALL:
            is_near = each.mape is not None and each.mape <= GOAL
            evidence.claim(f"{name}: mean error <= {GOAL:.0%}", is_near)
        evidence.notes.append(
            f"{_line(name, each)}; mean without fitted numbers {plain[name].mape or 0.0:.1%}"
        )
    evidence.notes += _reasons(found)
    return [evidence]
