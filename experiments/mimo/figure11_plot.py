"""Figure 11 drawn: curves in bfloat16, and how far every curve is from the mean of the baseline's orders."""

import statistics
from collections.abc import Mapping, Sequence

from experiments.harness.figure import GREY, LIGHT, Band, Grid, Line, Lines
from experiments.mimo.figure11_runs import Arithmetic, Mix, Played
from experiments.mimo.loss_curves import BASELINE
from workbench.report.palette import PAPER, mixed, module_hues

FEW = 4  # layouts up to which each has a name and a hue of its own
MIDDLE = mixed(GREY, PAPER, 0.5)
Curves = Mapping[Played, Sequence[float]]
Hues = Mapping[str, str]  # by layout, the same in all panels


def drawing(curves: Curves) -> Grid:
    """Two columns (LLM frozen, trained): losses in bfloat16, then deviations of either arithmetic."""
    hues = module_hues(tuple(dict.fromkeys(played.run.config for played in curves)))
    columns = []
    for trains_llm in (False, True):
        same = {p: losses for p, losses in curves.items() if p.run.trains_llm is trains_llm}
        by_kind = {kind: {p: x for p, x in same.items() if p.arithmetic is kind} for kind in Arithmetic}
        title = "LLM trained" if trains_llm else "LLM frozen"
        columns.append(
            [_losses(title, by_kind[Arithmetic.BFLOAT16], hues)]
            + [_deviations(f"{title}, {kind.value}", of, hues) for kind, of in by_kind.items()]
        )
    return Grid(rows=list(zip(*columns, strict=True)), panel_inches=(6.5, 3.6))


def _losses(title: str, curves: Curves, hues: Hues) -> Lines:
    first = {played.run.config: losses for played, losses in curves.items() if played.order == 0}
    lines = [
        Line(x=range(len(losses)), y=losses, colour=hues[name], label=name) for name, losses in first.items()
    ]
    return Lines(title=title, x="step", y="loss in bfloat16", lines=lines)


def _band(curves: Sequence[Sequence[float]], mean: Sequence[float], *, colour: str, label: str) -> Band:
    steps = list(zip(mean, zip(*curves, strict=True), strict=True))
    low, high = ([pick(at) / m - 1 for m, at in steps] for pick in (min, max))
    return Band(x=range(len(mean)), low=low, high=high, colour=colour, label=label)


def _deviations(title: str, curves: Curves, hues: Hues) -> Lines:
    baseline = {played: losses for played, losses in curves.items() if played.run.config == BASELINE}
    orders = [losses for played, losses in baseline.items() if played.mix is Mix.MICROBATCHES]
    grouped = [losses for played, losses in baseline.items() if played.mix is Mix.SAMPLES]
    y = "(loss - mean) / mean"
    if len(orders) < 2:
        return Lines(title=title, x="step", y=y, lines=())
    mean = [statistics.fmean(at) for at in zip(*orders, strict=True)]
    bands = [_band(orders, mean, colour=MIDDLE, label="baseline, orders of its sums")]
    if grouped:
        every = [*orders, *grouped]
        bands.insert(0, _band(every, mean, colour=LIGHT, label="baseline, other groupings too"))
    layouts = [played for played in curves if played.run.config != BASELINE]
    lines = [
        Line(
            x=range(len(mean)),
            y=[loss / m - 1 for loss, m in zip(curves[played], mean, strict=True)],
            colour=hues[played.run.config],
            width=0.7,
            label=played.run.config if len(layouts) < FEW else "",
        )
        for played in layouts
    ]
    named = title if len(layouts) < FEW else f"{title}: {len(layouts)} layouts"
    return Lines(title=named, x="step", y=y, lines=lines, bands=bands)
