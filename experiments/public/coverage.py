"""Whether 80 % intervals hold 80 % of published runs, each data set left out in turn.

Source:  the rows of `experiments.public.all`.
Ours:    intervals as `workbench predict` writes them, and the same scaled by one number: that with which 80 %
         of the rows of all other data sets lie inside. What a page leaves blank counts as unstated.
         `unfitted`: rows that have fitted numbers, without them, and the runs of `unseen`, `unseen_systems`
         and `unseen_third`: of their data sets' mean logarithms `LOST_BY_SYSTEM` is the median, and
         `OF_SYSTEM` the deviation of which 80 % of them are within `Z`. Judged on each system with those of
         the others. `multimodal`: the same of `unseen_multimodal` and `unseen_multimodal_second`, with
         adapters, for `LOST_BY_MULTIMODAL` and `OF_MULTIMODAL`.
Goals:   75 to 90 % of every data set of 20 rows or more, and of all; a median width (of the whole interval,
         over the prediction) of 25 % at most where a profile was measured, of 50 % where it was derived.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.harness.outcome import About, Evidence
from experiments.harness.script import script
from experiments.public import (
    unseen,
    unseen_multimodal,
    unseen_multimodal_second,
    unseen_systems,
    unseen_third,
)
from experiments.public.all import Scored, scored, unfitted
from experiments.public.published import published
from workbench.cost.profile import load_profile
from workbench.float_sum import float_sum
from workbench.llm_table.columns import read_row
from workbench.timing.interval import Z
from workbench.timing.systems import LOST_BY_MULTIMODAL, LOST_BY_SYSTEM, OF_MULTIMODAL, OF_SYSTEM

LEVEL, LEAST, MOST = 0.8, 0.75, 0.9
BLIND = (unseen.ROUND, unseen_systems.ROUND, unseen_third.ROUND)
MULTIMODAL = (unseen_multimodal.ROUND, unseen_multimodal_second.ROUND)
FEWEST = 20  # rows of a data set that is judged
WIDEST = {"measured": 0.25, "derived": 0.5}


@dataclass(frozen=True, slots=True)
class PricedRow:
    """A priced row with its error in half widths of its interval.

    Args:
        data_set: its data set.
        half_widths: |log of printed over predicted| over half the interval's log width; 1 is at its end.
        log_width: of the interval.
        kind: of its device's profile, "measured" or "derived".
    """

    data_set: str
    half_widths: float
    log_width: float
    kind: str


def priced_rows(rows: Sequence[Scored]) -> tuple[PricedRow, ...]:
    """All rows that have a price."""
    priced = []
    for prediction in rows:
        if prediction.iteration_s is None:
            continue
        width = math.log(prediction.high_s / prediction.low_s)
        off = abs(math.log(prediction.row.measured / prediction.row.predicted(prediction.iteration_s)))
        kind = "measured" if load_profile(prediction.row.cells["gpu"]).like is None else "derived"
        priced.append(PricedRow(prediction.row.data_set, off / (width / 2), width, kind))
    return tuple(priced)


def mean_logs(rows: Sequence[Scored]) -> dict[str, float]:
    """Data set -> mean logarithm of measured over predicted seconds."""
    logs: defaultdict[str, list[float]] = defaultdict(list)
    for prediction in rows:
        if prediction.iteration_s is not None:
            logs[prediction.row.data_set].append(math.log(prediction.row.measured_s / prediction.iteration_s))
    return {name: statistics.fmean(values) for name, values in logs.items()}


def of_systems(logs: Sequence[float]) -> tuple[float, float]:
    """Median of the systems' mean logarithms, and the deviation of which `LEVEL` of them lie within `Z`."""
    middle = statistics.median(logs)
    return middle, float(np.quantile([abs(each - middle) for each in logs], LEVEL)) / Z


def inside_left_out(seen: Mapping[str, Sequence[float]], off: Mapping[str, float]) -> float:
    """Share of runs inside what the means of all other systems say alone, without doubts of the run's own."""
    inside = []
    for name, logs in seen.items():
        middle, deviation = of_systems([mean for other, mean in off.items() if other != name])
        inside += [abs(log - middle) <= Z * deviation for log in logs]
    return float(np.mean(inside))


def stretch(rows: Sequence[PricedRow]) -> float:
    """The factor on all intervals with which they contain `LEVEL` of these rows."""
    return float(np.quantile([row.half_widths for row in rows], LEVEL))


def coverage(rows: Sequence[PricedRow], times: float = 1.0) -> float:
    """Share of rows inside intervals widened by a factor."""
    return float(np.mean([row.half_widths <= times for row in rows]))


def median_width(rows: Sequence[PricedRow], times: float = 1.0) -> float:
    """The median of interval width over prediction."""
    return float(np.median([2 * math.sinh(times * row.log_width / 2) for row in rows]))


def _figures(name: str, rows: Sequence[PricedRow], times: float) -> dict[str, float]:
    return {
        f"{name}/rows": float(len(rows)),
        f"{name}/coverage": coverage(rows),
        f"{name}/width": median_width(rows),
        f"{name}/stretch": times,
        f"{name}/coverage_stretched": coverage(rows, times),
        f"{name}/width_stretched": median_width(rows, times),
    }


def _of_systems(name: str, seen: Mapping[str, Sequence[float]], off: Mapping[str, float]) -> dict[str, float]:
    """Mean logarithms, what follows from them, and how it does on the runs `seen`, each system left out."""
    middle, deviation = of_systems(tuple(off.values()))
    return {f"{name}/{system}": value for system, value in off.items()} | {
        f"{name}/median": middle,
        f"{name}/deviation": deviation,
        f"{name}/inside_left_out": inside_left_out(seen, off),
    }


def _rounded(off: Mapping[str, float]) -> tuple[float, float]:
    middle, deviation = of_systems(tuple(off.values()))
    return round(middle, 2), round(deviation, 2)


@script()
def run() -> Evidence:
    """Evidence: coverage and width of every data set, with and without the factor fitted on the others."""
    predictions = [each for each in scored(published()) if each.iteration_s is not None]
    rows = priced_rows(predictions)
    evidence = Evidence(about=About.METHODS)
    without = [each for each in unfitted(predictions) if read_row(each.row.cells).fitted]
    seen = {name: logs for sets in BLIND for name, logs in sets.logs().items()}
    off = mean_logs(without) | {name: statistics.fmean(logs) for name, logs in seen.items()}
    evidence.ours |= _of_systems("unfitted", seen, off) | {
        "unfitted/rows": float(len(without)),
        "unfitted/coverage": coverage(priced_rows(without)),
    }
    trained = {name: logs for sets in MULTIMODAL for name, logs in sets.logs().items()}
    means = {name: statistics.fmean(logs) for name, logs in trained.items()}
    evidence.ours |= _of_systems("multimodal", trained, means)
    evidence.claim(
        "LOST_BY_SYSTEM and OF_SYSTEM follow from the systems' mean logarithms",
        _rounded(off) == (LOST_BY_SYSTEM, OF_SYSTEM),
    )
    evidence.claim(
        "LOST_BY_MULTIMODAL and OF_MULTIMODAL follow from those of multimodal trainers",
        _rounded(means) == (LOST_BY_MULTIMODAL, OF_MULTIMODAL),
    )
    names = tuple(dict.fromkeys(row.data_set for row in rows))
    left_out = []
    for name in names:
        own_rows = [row for row in rows if row.data_set == name]
        times = stretch([row for row in rows if row.data_set != name])
        left_out.append((own_rows, times))
        evidence.ours |= _figures(name, own_rows, times)
        if len(own_rows) >= FEWEST:
            fits = LEAST <= coverage(own_rows, times) <= MOST
            evidence.claim(f"{name}: {LEAST:.0%} to {MOST:.0%} inside, fitted on the others", fits)
    inside = float_sum(coverage(own_rows, times) * len(own_rows) for own_rows, times in left_out) / len(rows)
    evidence.ours |= _figures("all", rows, stretch(rows)) | {"all/coverage_left_out": inside}
    evidence.claim(f"all: {LEAST:.0%} to {MOST:.0%} inside, fitted on the others", LEAST <= inside <= MOST)
    for kind, widest in WIDEST.items():
        width = median_width([row for row in rows if row.kind == kind])
        evidence.ours[f"{kind}/width"] = width
        evidence.claim(f"median width of {kind} profiles <= {widest:.0%}", width <= widest)
    return evidence
