"""Whether 80 % intervals hold 80 % of published runs, each data set left out in turn.

Source:  the rows of `experiments.public.all`.
Ours:    intervals as `workbench predict` writes them, and the same times one number: that with which 80 %
         of the rows of all other data sets lie inside. A page's blanks count as unsaid.
Goals:   75 to 90 % of every data set of 20 rows or more, and of all; a median width (of the whole interval,
         over the prediction) of 25 % at most where a profile was measured, of 50 % where it was derived.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.all import Scored, scored
from experiments.public.published import published
from workbench.cost.profile import load_profile

LEVEL, LEAST, MOST = 0.8, 0.75, 0.9
FEWEST = 20  # rows of a data set that is judged
WIDEST = {"measured": 0.25, "derived": 0.5}


@dataclass(frozen=True, slots=True)
class Held:
    """A priced row: how far off it is, in half widths of its interval.

    Args:
        data_set: that it stands in.
        half_widths: |log of printed over predicted| over half the interval's log width; 1 lies at its end.
        log_width: of the interval.
        kind: of its device's profile, "measured" or "derived".
    """

    data_set: str
    half_widths: float
    log_width: float
    kind: str


def held(rows: Sequence[Scored]) -> tuple[Held, ...]:
    """Every row that has a price."""
    found = []
    for each in rows:
        if each.iteration_s is None:
            continue
        width = math.log(each.high_s / each.low_s)
        off = abs(math.log(each.row.measured / each.row.predicted(each.iteration_s)))
        kind = "measured" if load_profile(each.row.cells["gpu"]).like is None else "derived"
        found.append(Held(each.row.data_set, off / (width / 2), width, kind))
    return tuple(found)


def stretch(rows: Sequence[Held]) -> float:
    """What all intervals are multiplied with so that they hold `LEVEL` of these rows."""
    return float(np.quantile([row.half_widths for row in rows], LEVEL))


def coverage(rows: Sequence[Held], times: float = 1.0) -> float:
    """Share of rows inside intervals so many times as wide."""
    return float(np.mean([row.half_widths <= times for row in rows]))


def median_width(rows: Sequence[Held], times: float = 1.0) -> float:
    """High less low end over the prediction, in the middle."""
    return float(np.median([2 * math.sinh(times * row.log_width / 2) for row in rows]))


def _figures(name: str, rows: Sequence[Held], times: float) -> dict[str, float]:
    return {
        f"{name}/rows": float(len(rows)),
        f"{name}/coverage": coverage(rows),
        f"{name}/width": median_width(rows),
        f"{name}/stretch": times,
        f"{name}/coverage_stretched": coverage(rows, times),
        f"{name}/width_stretched": median_width(rows, times),
    }


@script()
def run() -> Evidence:
    """Coverage and width of every data set, with and without the stretch that the others fit."""
    rows = held(scored(published()))
    evidence = Evidence()
    names = tuple(dict.fromkeys(row.data_set for row in rows))
    left_out = []
    for name in names:
        own = [row for row in rows if row.data_set == name]
        times = stretch([row for row in rows if row.data_set != name])
        left_out.append((own, times))
        evidence.ours |= _figures(name, own, times)
        if len(own) >= FEWEST:
            fits = LEAST <= coverage(own, times) <= MOST
            evidence.claim(f"{name}: {LEAST:.0%} to {MOST:.0%} inside, fitted on the others", fits)
    inside = sum(coverage(own, times) * len(own) for own, times in left_out) / len(rows)
    evidence.ours |= _figures("all", rows, stretch(rows)) | {"all/coverage_left_out": inside}
    evidence.claim(f"all: {LEAST:.0%} to {MOST:.0%} inside, fitted on the others", LEAST <= inside <= MOST)
    for kind, widest in WIDEST.items():
        width = median_width([row for row in rows if row.kind == kind])
        evidence.ours[f"{kind}/width"] = width
        evidence.claim(f"median width of {kind} profiles <= {widest:.0%}", width <= widest)
    return evidence
