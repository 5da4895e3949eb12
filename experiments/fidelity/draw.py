"""Draws `experiments/results/fidelity.json`: predicted against executed, and errors by kind of action.

Reads the result file only, so the plot redraws without running anything.
Run: python -m experiments.fidelity.draw
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.paper import RESULTS
from experiments.plots import PLOTS

RESULT = RESULTS / "fidelity.json"
COLORS = {
    "clean": "#2166ac",
    "context": "#1b7837",
    "divided": "#bf812d",
    "crowded": "#b2182b",
    "emulated": "#762a83",
}
BAND = 0.03


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """One PNG of two panels."""
    figure, axes = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
    _iterations(axes[0], result["plans"])
    _kinds(axes[1], result["plans"])
    figure.suptitle(
        f"{result['num_plans']} plans; of the {result['pinned']['num_plans']} with a core to a rank that "
        "divide no weights: mean "
        f"absolute error {result['mean_abs_error']:.1%}, worst {result['worst_abs_error']:.1%}, "
        f"beside a spread of {result['spread']:.1%}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _iterations(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars from the fastest to the slowest step; the band is +-3 %."""
    for part, color in COLORS.items():
        mine = [row for row in rows if row["part"] == part]
        if not mine:
            continue
        executed = [row["executed_s"] for row in mine]
        down = [row["executed_s"] - row["lowest_s"] for row in mine]
        up = [row["highest_s"] - row["executed_s"] for row in mine]
        predicted = [row["predicted_s"] for row in mine]
        axes.errorbar(
            predicted, executed, yerr=(down, up), fmt="o", color=color, markersize=4, alpha=0.7, label=part
        )
    ends = [row[name] for row in rows for name in ("predicted_s", "executed_s")]
    low, high = min(ends) / 1.2, max(ends) * 1.2
    axes.fill_between(
        (low, high),
        (low * (1 - BAND), high * (1 - BAND)),
        (low * (1 + BAND), high * (1 + BAND)),
        color="#cccccc",
        alpha=0.6,
        linewidth=0,
        label=f"+-{BAND:.0%}",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel="predicted, s",
        ylabel="executed, s",
    )
    axes.set_title("iteration time; bars: fastest to slowest step", fontsize=10)
    axes.legend(fontsize=8)


def _kinds(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """One point per plan and kind of action, beside the iteration."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["kinds"]))
    for place, kind in enumerate(["iteration", *kinds]):
        for part, color in COLORS.items():
            errors = [
                row["error"] if kind == "iteration" else row["kinds"][kind]["error"]
                for row in rows
                if row["part"] == part and (kind == "iteration" or kind in row["kinds"])
            ]
            offsets = [place + 0.5 * (index + 0.5) / len(errors) - 0.25 for index in range(len(errors))]
            axes.scatter(offsets, [100 * error for error in errors], color=color, s=14, alpha=0.7)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhspan(-100 * BAND, 100 * BAND, color="#cccccc", alpha=0.5, linewidth=0)
    axes.set_xticks(range(len(kinds) + 1), ["iteration", *kinds], fontsize=8, rotation=20)
    axes.set_ylabel("predicted / executed - 1, %")
    axes.set_title("error of every plan by kind of action (seconds of all ranks)", fontsize=10)


def main() -> int:
    print(draw(json.loads(RESULT.read_text()), PLOTS / "fidelity.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
