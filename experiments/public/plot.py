"""Predicted against measured seconds of every row, as one PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from experiments.plots import PLOTS


def scatter(script: str, points: Mapping[str, Sequence[Any]]) -> Path:
    """Held-out rows, the diagonal, and a band of 5 %; returns the file's path."""
    measured = [points["measured_s"][index] for index in points["held_out"]]
    predicted = [points["predicted_s"][index] for index in points["held_out"]]
    ends = [min(measured) / 1.1, max(measured) * 1.1]
    figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
    axes.fill_between(
        ends, [end * 0.95 for end in ends], [end * 1.05 for end in ends], color="#dddddd", label="5 %"
    )
    axes.plot(ends, ends, color="#777777", linewidth=0.8)
    axes.scatter(measured, predicted, s=6, alpha=0.5, color="#2166ac", label=f"{len(measured)} held-out rows")
    axes.set(xscale="log", yscale="log", xlabel="measured s", ylabel="predicted s", xlim=ends, ylim=ends)
    axes.set_title(script)
    axes.legend()
    PLOTS.mkdir(parents=True, exist_ok=True)
    path = PLOTS / f"{script.replace('/', '_')}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
