"""Plots of the result files: every printed number against ours, and the gains side by side.

Reads `experiments/results/*.json` only, so a plot redraws without rerunning anything.
Run: python -m experiments.plots
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.attention_plots import draw_attention
from experiments.figure_plots import draw_throughputs, has_throughputs
from experiments.paper import RESULTS

PLOTS = RESULTS / "plots"
COLORS = {"ok": "#1b7837", "UNDERSPECIFIED": "#2166ac", "OFF": "#b2182b", "MISSING": "#777777"}
MARKERS = {"printed": "o", "modelled": "s", "rule": "^", "itself": "D"}
COMPARED = (
    "gain",
    "ratio",
    "bwd_over_fwd",
    "speed_over_h",
)  # last part of the keys that are ratios between two methods

ResultRow = Mapping[str, Any]


def draw(record: Mapping[str, Any], folder: Path) -> Path | None:
    """One PNG per result; None when it has no printed numbers."""
    rows = [row for row in record["rows"] if row["ours"]]
    if not rows:
        return None
    compared = [row for row in rows if row["key"].split("/")[-1] in COMPARED]
    figure: Figure
    figure, axes = plt.subplots(
        1, 2, figsize=(14, 6), width_ratios=(1, 1.5 if compared else 0.01), layout="constrained"
    )
    _scatter(axes[0], [row for row in rows if row not in compared] or rows)
    if compared:
        _bars(axes[1], compared)
    else:
        axes[1].set_visible(False)
    counts = ", ".join(
        f"{sum(row['verdict'] == verdict for row in record['rows'])} {verdict}" for verdict in COLORS
    )
    figure.suptitle(f"{record['script']}: {counts}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['script'].replace('/', '_')}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _scatter(axes: Axes, rows: Sequence[ResultRow]) -> None:
    """Printed against ours, both logarithmic; a bar is our range over what is unstated."""
    for verdict, color in COLORS.items():
        for evidence, marker in MARKERS.items():
            chosen = [r for r in rows if r["verdict"] == verdict and r["key"].split("/")[0] == evidence]
            if not chosen:
                continue
            printed, ours = [r["paper"] for r in chosen], [r["ours"] for r in chosen]
            axes.errorbar(printed, ours, yerr=_errors(chosen), fmt="none", ecolor=color, alpha=0.25)
            axes.scatter(printed, ours, c=color, marker=marker, s=28, label=f"{evidence}: {verdict}")
    ends = [
        end for row in rows if row["unstated"] for end in (row["unstated"]["low"], row["unstated"]["high"])
    ]
    values = [value for row in rows for value in (row["paper"], row["ours"])] + [end for end in ends if end]
    low, high = min(values) / 1.5, max(values) * 1.5
    axes.plot((low, high), (low, high), color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="paper", ylabel="ours")
    units = ", ".join(dict.fromkeys(row["unit"] for row in rows))
    axes.set_title(f"all other numbers ({units})", fontsize=10)
    axes.legend(fontsize=8)


def _bars(axes: Axes, rows: Sequence[ResultRow]) -> None:
    """Ratios in pairs of bars, ours with its range."""
    places = range(len(rows))
    axes.bar(
        [place - 0.2 for place in places], [row["paper"] for row in rows], 0.4, color="#bbbbbb", label="paper"
    )
    axes.bar(
        [place + 0.2 for place in places],
        [row["ours"] for row in rows],
        0.4,
        color=[COLORS[row["verdict"]] for row in rows],
        yerr=_errors(rows),
        ecolor="#444444",
        capsize=2,
        label="ours (colour: verdict)",
    )
    axes.axhline(1, color="black", linewidth=0.8)
    labels = [
        row["key"].rpartition("/")[0].replace("printed/", "p/").replace("modelled/", "m/") for row in rows
    ]
    axes.set_xticks(list(places), labels, rotation=60, ha="right", fontsize=8)
    axes.set_title("ratios (p: printed stage times, m: own model)", fontsize=10)
    axes.legend(fontsize=8)


def _errors(rows: Sequence[ResultRow]) -> tuple[list[float], list[float]]:
    """Distances from ours down and up to the ends of its range."""
    ranges = [row["unstated"] or {"low": row["ours"], "high": row["ours"]} for row in rows]
    return (
        [max(0.0, row["ours"] - ends["low"]) for row, ends in zip(rows, ranges, strict=True)],
        [max(0.0, ends["high"] - row["ours"]) for row, ends in zip(rows, ranges, strict=True)],
    )


def records(folder: Path = RESULTS) -> Iterable[Mapping[str, Any]]:
    """Results of scripts; files of other benchmarks have no rows and are passed over."""
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and "rows" in record and "script" in record:
            yield record


def main() -> int:
    for record in records():
        path = (draw_throughputs if has_throughputs(record) else draw)(record, PLOTS)
        if path is not None:
            print(path)
    attention = RESULTS / "bench_attention.json"
    if attention.is_file():
        for path in draw_attention(json.loads(attention.read_text()), PLOTS):
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
