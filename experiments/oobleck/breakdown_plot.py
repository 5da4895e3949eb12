"""Figures 2.1 and 2.11 as stacked bars, from the file that `figure2_11` writes.

Run:     python -m experiments.oobleck.breakdown_plot
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.oobleck.systems import MODELS
from experiments.paper import RESULTS

COLORS = {
    "effective": "#1b9e77",
    "redundant": "#7570b3",
    "idle_nodes": "#bbbbbb",
    "checkpoint": "#e6ab02",
    "recovery": "#d95f02",
    "lost": "#b2182b",
    "waiting": "#555555",
}
TITLES = {model.replace(" ", "-"): model for model in MODELS}
FIGURES = {"figure2_1": ("bamboo", "varuna"), "figure2_11": ("bamboo", "varuna", "oobleck")}

Bars = Mapping[str, Mapping[str, float]]  # "interval, system" -> part -> fraction


def bars_by_model(
    ours: Mapping[str, float], systems: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Model -> "interval, system" -> part -> fraction of the window, of these systems."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in ours.items():
        _, model, interval, system, part = key.split("/")
        if system in systems:
            found.setdefault(model, {}).setdefault(f"{interval}\n{system}", {})[part] = value
    return found


def draw(result: Path = RESULTS / "oobleck_figure2_11.json") -> list[Path]:
    """Both figures; one panel per model, one bar per interval and system."""
    ours = json.loads(result.read_text())["ours"]
    folder = result.parent / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, systems in FIGURES.items():
        models = bars_by_model(ours, systems)
        figure, axes = plt.subplots(
            1, len(models), figsize=(5.5 * len(models), 4), squeeze=False, layout="constrained"
        )
        for place, (model, bars) in enumerate(models.items()):
            _panel(axes[0][place], model, bars)
        axes[0][0].set_ylabel("fraction of the time")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8)
        paths.append(folder / f"oobleck_{name}.png")
        figure.savefig(paths[-1], dpi=90, metadata={"Software": None})
        plt.close(figure)
    return paths


def _panel(axes: Axes, model: str, bars: Bars) -> None:
    bottoms = [0.0] * len(bars)
    for part, color in COLORS.items():
        heights = [parts.get(part, 0.0) for parts in bars.values()]
        axes.bar(list(bars), heights, bottom=bottoms, color=color, label=part.replace("_", " "), width=0.7)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_title(TITLES[model])
    axes.set_ylim(0, 1)
    axes.tick_params(axis="x", labelsize=8)


if __name__ == "__main__":
    draw()
