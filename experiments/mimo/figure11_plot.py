"""Figure 11 drawn: curves in bfloat16, and how far every curve is from the mean of the baseline's orders."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.mimo.figure11_runs import Arithmetic, Mix, Played
from experiments.mimo.loss_curves import BASELINE

Curves = Mapping[Played, Sequence[float]]


def draw(curves: Curves, path: Path) -> None:
    """Two columns (LLM frozen, trained): losses in bfloat16, then deviations of either arithmetic."""
    figure, axes = plt.subplots(3, 2, figsize=(13, 11), layout="constrained", squeeze=False)
    for column, trains_llm in enumerate((False, True)):
        same = {p: losses for p, losses in curves.items() if p.run.trains_llm is trains_llm}
        _losses(axes[0][column], {p: x for p, x in same.items() if p.arithmetic is Arithmetic.BFLOAT16})
        axes[0][column].set_title("LLM trained" if trains_llm else "LLM frozen")
        for row, arithmetic in enumerate(Arithmetic, start=1):
            _deviations(axes[row][column], {p: x for p, x in same.items() if p.arithmetic is arithmetic})
            axes[row][column].set_ylabel(f"{arithmetic.value}: (loss - mean) / mean")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _losses(axes: Axes, curves: Curves) -> None:
    for played, losses in curves.items():
        if played.order == 0:
            axes.plot(losses, label=played.run.config, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss in bfloat16")
    if curves:
        axes.legend(fontsize=8)


def _band(
    axes: Axes, curves: Sequence[Sequence[float]], mean: Sequence[float], *, color: str, label: str
) -> None:
    low = [min(at) / m - 1 for m, at in zip(mean, zip(*curves, strict=True), strict=True)]
    high = [max(at) / m - 1 for m, at in zip(mean, zip(*curves, strict=True), strict=True)]
    axes.fill_between(range(len(mean)), low, high, color=color, label=label)


def _deviations(axes: Axes, curves: Curves) -> None:
    baseline = {played: losses for played, losses in curves.items() if played.run.config == BASELINE}
    orders = [losses for played, losses in baseline.items() if played.mix is Mix.MICROBATCHES]
    grouped = [losses for played, losses in baseline.items() if played.mix is Mix.SAMPLES]
    if len(orders) < 2:
        return
    mean = [statistics.fmean(at) for at in zip(*orders, strict=True)]
    if grouped:
        _band(axes, [*orders, *grouped], mean, color="#dddddd", label="baseline, other groupings too")
    _band(axes, orders, mean, color="#aaaaaa", label="baseline, orders of its sums")
    layouts = [played for played in curves if played.run.config != BASELINE]
    for played in layouts:
        shares = [loss / m - 1 for loss, m in zip(curves[played], mean, strict=True)]
        label = played.run.config if len(layouts) < 4 else None
        axes.plot(shares, linewidth=0.7, label=label)
    title = "" if len(layouts) < 4 else f"{len(layouts)} layouts"
    axes.legend(fontsize=8, title=title)
    axes.set_xlabel("step")
