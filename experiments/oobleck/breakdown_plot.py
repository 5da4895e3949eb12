"""Figures 2.1 and 2.11 as stacked bars, from the file that `figure2_11` writes.

Run:     python -m experiments.oobleck.breakdown_plot
"""

import json
from collections.abc import Mapping, Sequence

from experiments.harness.drawing import PLOTS, save
from experiments.harness.figure import BLACK, BLUE, GREEN, GREY, LIGHT, ORANGE, RED, Bars, Grid, Series
from experiments.harness.record import RESULTS
from experiments.oobleck.systems import MODELS

COLOURS = {
    "effective": GREEN,
    "redundant": BLUE,
    "idle_nodes": LIGHT,
    "checkpoint": ORANGE,
    "recovery": RED,
    "lost": BLACK,
    "waiting": GREY,
}
TITLES = {model.replace(" ", "-"): model for model in MODELS}
FIGURES = {"figure2_1": ("bamboo", "varuna"), "figure2_11": ("bamboo", "varuna", "oobleck")}


def bars_by_model(
    ours: Mapping[str, float], systems: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Model -> "interval, system" -> part -> fraction of the window, for some systems."""
    bars_of: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in ours.items():
        _, model, interval, system, part = key.split("/")
        if system in systems:
            bars_of.setdefault(model, {}).setdefault(f"{interval}\n{system}", {})[part] = value
    return bars_of


def drawings(ours: Mapping[str, float]) -> dict[str, Grid]:
    """The drawings of both figures: one panel per model, one bar per interval and system."""
    return {
        f"oobleck_{name}": Grid(
            rows=[[_panel(model, bars) for model, bars in bars_by_model(ours, systems).items()]],
            panel_inches=(5.5, 4.0),
        )
        for name, systems in FIGURES.items()
    }


def _panel(model: str, bars: Mapping[str, Mapping[str, float]]) -> Bars:
    parts = [
        Series(
            values=[fractions.get(part, 0.0) for fractions in bars.values()],
            colour=colour,
            label=part.replace("_", " "),
        )
        for part, colour in COLOURS.items()
    ]
    return Bars(
        title=TITLES[model],
        y="fraction of the time",
        y_limits=(0, 1),
        names=list(bars),
        series=parts,
        stacked=True,
    )


if __name__ == "__main__":
    kept = json.loads((RESULTS / "oobleck_figure2_11.json").read_text())
    for name, grid in drawings(kept["ours"]).items():
        save(grid, PLOTS, name)
