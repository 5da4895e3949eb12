"""Plots of the result files: every printed number against ours, and the gains side by side.

Reads `experiments/results/*.json` only, so a plot redraws without rerunning anything. Scripts with a drawing
of their own make it when they run.
Run: python -m experiments.plots
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.bench.attention_plots import attention_figures
from experiments.cornstarch.figure_plots import has_throughputs, throughputs
from experiments.fidelity.draw import drawing
from experiments.harness.drawing import PLOTS, save
from experiments.harness.figure import (
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    RED,
    SKY,
    Bars,
    Errors,
    Grid,
    Line,
    Lines,
    Panel,
    Series,
)
from experiments.harness.outcome import Verdict
from experiments.harness.record import RESULTS, stored_records
from experiments.harness.script import draws_itself

COLOURS: Mapping[str, str] = {
    Verdict.OK: GREEN,
    Verdict.OK_AT_DEFAULT: GREEN,
    Verdict.IN_RANGE: SKY,
    Verdict.UNDETERMINED: BLUE,
    Verdict.REFUTED: ORANGE,
    Verdict.OFF: RED,
    Verdict.MISSING: GREY,
}
MARKERS = {"printed": "o", "modelled": "s", "rule": "^", "itself": "D"}
COMPARED = (
    "gain",
    "ratio",
    "bwd_over_fwd",
    "speed_over_h",
)  # ratios between two methods, by their keys' ends
BAR_INCHES = 0.3
OTHERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Grid]]] = {  # results that are no script's
    "bench_attention": attention_figures,
    "fidelity": lambda record: {"fidelity": drawing(record)},
}

ResultRow = Mapping[str, Any]


def comparison(record: Mapping[str, Any]) -> Grid | None:
    """One drawing per result; None when it has no printed numbers."""
    rows = [row for row in record["rows"] if row["ours"]]
    if not rows:
        return None
    compared = [row for row in rows if row["key"].split("/")[-1] in COMPARED]
    others = [row for row in rows if row not in compared]
    panels: list[Panel] = [
        _against(unit, [row for row in others if row["unit"] == unit])
        for unit in dict.fromkeys(row["unit"] for row in others)
    ]
    widths = [1.0] * len(panels)
    height = 5.0
    if compared:
        panels.append(_ratios(compared))
        widths.append(max(1.0, BAR_INCHES * len(compared) / height))
    counts = ", ".join(
        f"{count} {verdict}"
        for verdict in COLOURS
        if (count := sum(row["verdict"] == verdict for row in record["rows"]))
    )
    return Grid(
        rows=[panels], title=f"{record['script']}: {counts}", panel_inches=(height, height), widths=widths
    )


def _against(unit: str, rows: Sequence[ResultRow]) -> Lines:
    """Printed against ours, both logarithmic; a bar is our range over what is unstated."""
    points = [
        _points(f"{evidence}: {verdict}", verdict, evidence, chosen)
        for verdict in COLOURS
        for evidence in dict.fromkeys(_evidence(row) for row in rows)
        if (chosen := [row for row in rows if (row["verdict"], _evidence(row)) == (verdict, evidence)])
    ]
    ranges = [row["unstated"][end] for row in rows if row["unstated"] for end in ("low", "high")]
    values = [row[side] for row in rows for side in ("paper", "ours")] + [end for end in ranges if end]
    limits = (min(values) / 1.5, max(values) * 1.5)
    unit = unit or "no unit"
    return Lines(
        x=f"paper, {unit}",
        y=f"ours, {unit}",
        log="xy",
        x_limits=limits,
        y_limits=limits,
        lines=[Line(x=limits, y=limits, colour=GREY, width=0.8), *points],
    )


def _points(label: str, verdict: str, evidence: str, rows: Sequence[ResultRow]) -> Line:
    return Line(
        x=[row["paper"] for row in rows],
        y=[row["ours"] for row in rows],
        errors=_errors(rows),
        colour=COLOURS[verdict],
        style="",
        marker=MARKERS.get(evidence, "v"),
        label=label,
    )


def _evidence(row: ResultRow) -> str:
    return str(row["key"].split("/")[0])


def _ratios(rows: Sequence[ResultRow]) -> Bars:
    """Ratios in pairs of bars, ours with its range and in its verdict's colour."""
    names = [
        row["key"].rpartition("/")[0].replace("printed/", "p/").replace("modelled/", "m/") for row in rows
    ]
    printed = Series(values=[row["paper"] for row in rows], colour=LIGHT, label="paper's ratio")
    ours = Series(
        values=[row["ours"] for row in rows],
        colour=[COLOURS[row["verdict"]] for row in rows],
        label=[f"our ratio: {row['verdict']}" for row in rows],
        errors=_errors(rows),
    )
    title = "ratios, paper's left, ours right (p: printed stage times, m: own model)"
    return Bars(title=title, y="times", names=names, series=[printed, ours], level=1, slant=60)


def _errors(rows: Sequence[ResultRow]) -> Errors:
    """Distances from ours down and up to the ends of its range."""
    ranges = [row["unstated"] or {"low": row["ours"], "high": row["ours"]} for row in rows]
    return (
        [max(0.0, row["ours"] - ends["low"]) for row, ends in zip(rows, ranges, strict=True)],
        [max(0.0, ends["high"] - row["ours"]) for row, ends in zip(rows, ranges, strict=True)],
    )


def main() -> int:
    figures: dict[str, Grid | None] = {
        record["script"].replace("/", "_"): (throughputs if has_throughputs(record) else comparison)(record)
        for record in stored_records()
        if not draws_itself(record["script"])
    }
    for name, of_record in OTHERS.items():
        if (path := RESULTS / f"{name}.json").is_file():
            figures |= of_record(json.loads(path.read_text()))
    for name, grid in figures.items():
        for path in save(grid, PLOTS, name) if grid else ():
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
