"""Every published training run that the project carries, predicted as `workbench predict` does.

Source:  experiments/public/data, nine files of eight projects; `workbench/llm_table/frameworks.toml` fills
         what a page leaves blank by one rule a framework.
Ours:    the path of `workbench predict` with the shipped defaults: plan, lowering, price, sweep. For
         `mape_unfitted`, the numbers fitted to a framework are left out (`experiments.public.fitted` has
         their errors on rows that they were not fitted to).
Setup:   an error is the relative difference from the printed value, in seconds where the page prints a
         throughput; above zero: predicted too slow. Refused are rows whose notation or device `predict`
         lacks; unscorable are those without cells, counted apart.
Run:     python -m experiments.public.all [--json]
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter

import numpy as np
from scipy.stats import kendalltau

from experiments.harness.command import command_line
from experiments.harness.outcome import About, Evidence
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
    """A row with its prediction, or the reason why there is none."""

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
        """Whether the printed value is inside the interval."""
        ends = self.row.predicted(self.low_s), self.row.predicted(self.high_s)
        return min(ends) <= self.row.measured <= max(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors over the rows of a data set.

    Args:
        mape, median, p90, worst: of the absolute relative error.
        signed: mean error; above zero: predicted too slow.
        kendall_tau: between predicted and printed, in one unit; None for fewer than two rows.
        coverage_80: share of rows inside their 80 % interval.
        width_80: median width of these intervals over the prediction.
        rows: number of scored rows.
        refused: rows not priced, for lack of notation or of a device.
        unscorable: rows without cells.
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
    """Predict every row as `workbench predict` does."""
    predictor = RowPredictor(iteration_s)
    return tuple(_scored(row, predictor) for row in rows)


def unfitted(predictions: Iterable[Scored]) -> tuple[Scored, ...]:
    """Predictions without numbers fitted to a framework; rows of other frameworks are unchanged."""
    predictor = RowPredictor(iteration_s)
    return tuple(
        _scored(prediction.row, predictor, lambda row: replace(row, fitted=()))
        if prediction.iteration_s is not None and read_row(prediction.row.cells).fitted
        else prediction
        for prediction in predictions
    )


def _scored(
    row: Published, predictor: RowPredictor, change: Callable[[LlmRow], LlmRow] = lambda row: row
) -> Scored:
    if row.unscorable is not None:
        return Scored(row=row)
    began_s = perf_counter()
    try:
        check_header(tuple(row.cells))
        prediction = predictor.predict(change(read_row(row.cells)), row.unsaid)
    except ValueError as error:
        return Scored(row=row, refused=str(error))
    return Scored(
        row=row,
        iteration_s=prediction.iteration_s,
        low_s=prediction.interval.low_s,
        high_s=prediction.interval.high_s,
        took_s=perf_counter() - began_s,
    )


def score(predictions: Sequence[Scored]) -> Score:
    """The score of some rows, in one unit or several."""
    priced = [
        (prediction, prediction.iteration_s)
        for prediction in predictions
        if prediction.iteration_s is not None
    ]
    errors = np.array([prediction.row.error(seconds) for prediction, seconds in priced])
    size = np.abs(errors)
    has_rows = len(priced) > 0
    return Score(
        mape=float(size.mean()) if has_rows else None,
        median=float(np.median(size)) if has_rows else None,
        signed=float(errors.mean()) if has_rows else None,
        p90=float(np.quantile(size, 0.9)) if has_rows else None,
        worst=float(size.max()) if has_rows else None,
        kendall_tau=_kendall(priced),
        coverage_80=float(np.mean([prediction.is_inside for prediction, _ in priced])) if has_rows else None,
        width_80=_width(priced),
        rows=len(priced),
        refused=sum(prediction.refused is not None for prediction in predictions),
        unscorable=sum(prediction.row.unscorable is not None for prediction in predictions),
    )


def _width(priced: Sequence[tuple[Scored, float]]) -> float | None:
    widths = [(prediction.high_s - prediction.low_s) / seconds for prediction, seconds in priced]
    return float(np.median(widths)) if widths else None


def _kendall(priced: Sequence[tuple[Scored, float]]) -> float | None:
    if len({prediction.row.target for prediction, _ in priced}) != 1 or len(priced) < 2:
        return None
    predicted = [prediction.row.predicted(seconds) for prediction, seconds in priced]
    tau = kendalltau(predicted, [prediction.row.measured for prediction, _ in priced]).statistic
    return float(tau) if np.isfinite(tau) else None


def scores(predictions: Sequence[Scored]) -> dict[str, Score]:
    """Scores by data set, and of all rows."""
    names = dict.fromkeys(prediction.row.data_set for prediction in predictions)
    by_name = {
        name: score([prediction for prediction in predictions if prediction.row.data_set == name])
        for name in names
    }
    return by_name | {ALL: score(predictions)}


def _record(prediction: Scored) -> dict[str, object]:
    row = prediction.row
    return {
        "data_set": row.data_set,
        "line": row.line,
        "model": row.model,
        "gpu": row.cells.get("gpu"),
        "gpus": row.cells.get("gpus"),
        "target": row.target,
        "measured": row.measured,
        "predicted": None if prediction.iteration_s is None else row.predicted(prediction.iteration_s),
        "error": prediction.error,
        "interval_s": None if prediction.iteration_s is None else [prediction.low_s, prediction.high_s],
        "refused": prediction.refused,
        "unscorable": row.unscorable,
        "took_s": round(prediction.took_s, 3),
    }


def _line(name: str, row: Score) -> str:
    text = f"{name}: {row.rows} rows, {row.refused} refused, {row.unscorable} unscorable"
    if row.mape is None or row.median is None or row.p90 is None or row.worst is None:
        return text
    tau = "none" if row.kendall_tau is None else f"{row.kendall_tau:.3f}"
    return (
        f"{text}; mean {row.mape:.1%}, median {row.median:.1%}, signed {row.signed:+.1%}, "
        f"p90 {row.p90:.1%}, worst {row.worst:.1%}, tau {tau}, {row.coverage_80:.0%} inside their 80 % "
        f"interval, {row.width_80:.0%} wide in the median"
    )


def _reasons(predictions: Sequence[Scored]) -> list[str]:
    """Distinct reasons for rows without a price, with their counts."""
    counts: dict[str, int] = {}
    for prediction in predictions:
        for kind, reason in (("refused", prediction.refused), ("unscorable", prediction.row.unscorable)):
            if reason is not None:
                text = f"{kind}: {prediction.row.data_set}: {reason}"
                counts[text] = counts.get(text, 0) + 1
    return [f"{text} ({count} rows)" for text, count in counts.items()]


def main(run: Script) -> int:
    """The script's command; `--json` also prints every data set's score, null where there is none."""
    arguments = command_line(__doc__).parse_args()
    result = run()
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    data_sets = {
        name: {key: result.ours.get(f"{name}/{key}") for key in Score.__dataclass_fields__}
        for name in (*dict.fromkeys(row["data_set"] for row in rows), ALL)
    }
    return finished(result, as_json=arguments.json, more={"data_sets": data_sets})


@script(command=main)
def run() -> Parts:
    """Price every row, store each outcome, and compute the errors."""
    predictions = scored(published())
    write_text(
        "".join(json.dumps(_record(result)) + "\n" for result in predictions), results_folder() / ROWS.name
    )
    by_name = scores(predictions)
    plain = scores(unfitted(predictions))
    ours = {
        f"{name}/{key}": float(value)
        for name, result in by_name.items()
        for key, value in asdict(result).items()
        if value is not None
    }
    ours |= {
        f"{name}/mape_unfitted": result.mape for name, result in plain.items() if result.mape is not None
    }
    evidence = Evidence(ours=ours, about=About.METHODS)
    for name, result in by_name.items():
        if name != ALL:
            is_near = result.mape is not None and result.mape <= GOAL
            evidence.claim(f"{name}: mean error <= {GOAL:.0%}", is_near)
        evidence.notes.append(
            f"{_line(name, result)}; mean without fitted numbers {plain[name].mape or 0.0:.1%}"
        )
    evidence.notes += _reasons(predictions)
    return [evidence]
