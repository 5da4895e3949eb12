"""Draws the grids of `experiments.harness.figure` as PNG and PDF, all in one style."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from experiments.harness.figure import GREY, Bars, Frame, Grid, Line, Lines, Panel, Spreads, Timeline
from experiments.harness.record import RESULTS
from workbench.float_sum import float_sum
from workbench.report.palette import INK, module_hues, tone
from workbench.schedule.action import Pass

PLOTS = RESULTS / "plots"
STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E9ED",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "errorbar.capsize": 2,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 110,
    "pdf.fonttype": 42,
}
BAR_SHARE = 0.8  # of the room of a name that its bars take
LEGEND_COLUMNS = 6
UNDATED = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}}


def save(grid: Grid, folder: Path, name: str) -> tuple[Path, ...]:
    """Write `<name>.png` and `<name>.pdf`, byte for byte reproducible for the same grid."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(dict(STYLE)):
        figure = drawn(grid)
        paths = tuple(folder / f"{name}.{kind}" for kind in UNDATED)
        for path in paths:
            figure.savefig(path, metadata=UNDATED[path.suffix.removeprefix(".")])
        plt.close(figure)
    return paths


def drawn(grid: Grid) -> Figure:
    """Context with the open figure of a grid."""
    columns = max(len(row) for row in grid.rows)
    width, height = grid.panel_inches
    heights, widths = grid.heights or [1.0] * len(grid.rows), grid.widths or [1.0] * columns
    figure: Figure
    figure, axes_grid = plt.subplots(
        len(grid.rows),
        columns,
        figsize=(width * float_sum(widths), height * float_sum(heights)),
        height_ratios=heights,
        width_ratios=widths,
        squeeze=False,
        sharex=grid.shares_x,
        sharey=grid.shares_y,
    )
    for row, panels in zip(axes_grid, grid.rows, strict=True):
        for axes, panel in zip(row, panels, strict=True):
            if panel is None:
                axes.set_visible(False)
            else:
                _panel(axes, panel)
    _legend(figure)
    if grid.title:
        figure.suptitle(grid.title, fontsize=10, wrap=True)
    return figure


def _panel(axes: Axes, panel: Panel) -> None:
    kinds: Mapping[type, Callable[[Axes, Any], None]] = {
        Bars: _bars,
        Lines: _lines,
        Spreads: _spreads,
        Timeline: _timeline,
    }
    _frame(axes, panel)
    kinds[type(panel)](axes, panel)
    low, high = panel.x_limits
    axes.set_xlim(low, high)
    axes.set_ylim(*panel.y_limits) if not isinstance(panel, Timeline) else None
    for axis in (axes.xaxis, axes.yaxis):
        _plain_numbers(axis)


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis of less than a decade, on which powers of ten leave at most one number."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log" and high < 10 * low:
        axis.set_major_locator(MaxNLocator(nbins=5))
        axis.set_major_formatter(ScalarFormatter(useOffset=False))
        axis.set_minor_locator(NullLocator())


def _frame(axes: Axes, frame: Frame) -> None:
    axes.set_title(frame.title, wrap=True)
    axes.set(xlabel=frame.x, ylabel=frame.y)
    if "x" in frame.log:
        axes.set_xscale("log")
    if "y" in frame.log:
        axes.set_yscale("log")
    if frame.level is not None:
        axes.axhline(frame.level, color=INK, linewidth=0.8, linestyle="--")


def _names(axes: Axes, names: Any, slant: float) -> None:
    axes.set_xticks(
        range(len(names)), names, rotation=slant, ha="right" if slant else "center", rotation_mode="anchor"
    )
    axes.grid(visible=False, axis="x")


def _bars(axes: Axes, panel: Bars) -> None:
    width = BAR_SHARE / (1 if panel.stacked else len(panel.series))
    bottom = [0.0] * len(panel.names)
    for index, series in enumerate(panel.series):
        shift = 0.0 if panel.stacked else width * (index + 0.5) - BAR_SHARE / 2
        axes.bar(
            [position + shift for position in range(len(panel.names))],
            series.values,
            width,
            bottom=bottom,
            color=series.colour,
            yerr=series.errors,
            ecolor=GREY,
            label=series.label,
        )
        if panel.stacked:
            bottom = [low + value for low, value in zip(bottom, series.values, strict=True)]
    _names(axes, panel.names, panel.slant)


def _lines(axes: Axes, panel: Lines) -> None:
    for band in panel.bands:
        axes.fill_between(
            band.x, band.low, band.high, color=band.colour, linewidth=0, label=band.label, zorder=0.5
        )
    for line in panel.lines:
        _line(axes, line)
    if panel.names:
        _names(axes, panel.names, panel.slant)
    elif "x" not in panel.log and all(isinstance(x, int) for line in panel.lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # counts have no fractions


def _line(axes: Axes, line: Line) -> None:
    axes.errorbar(
        line.x,
        line.y,
        yerr=line.errors,
        label=line.label,
        color=line.colour,
        linestyle=line.style or "none",
        linewidth=line.width,
        marker=line.marker,
        markersize=4,
        drawstyle="steps-post" if line.step else "default",
        elinewidth=0.8,
        capsize=0,
    )


def _spreads(axes: Axes, panel: Spreads) -> None:
    axes.boxplot(
        list(panel.values.values()),
        positions=range(len(panel.values)),
        widths=BAR_SHARE * 0.7,
        showfliers=False,
        medianprops={"color": module_hues(("",))[""]},
    )
    _names(axes, list(panel.values), panel.slant)


def _timeline(axes: Axes, panel: Timeline) -> None:
    hues = module_hues(tuple(dict.fromkeys(box.module for box in panel.boxes)))
    for module, hue in hues.items():
        for is_forward in (True, False):
            of_kind = [box for box in panel.boxes if (box.module, box.is_forward) == (module, is_forward)]
            axes.barh(
                [box.row for box in of_kind],
                [box.end - box.start for box in of_kind],
                left=[box.start for box in of_kind],
                color=tone(hue, Pass.F if is_forward else Pass.B),
                edgecolor="white",
                linewidth=0.3,
                label=f"{module} {'forward' if is_forward else 'backward'}",
            )
    axes.invert_yaxis()
    axes.grid(visible=False)


def _legend(figure: Figure) -> None:
    """Draw one legend for all panels, below them and no wider, with each label once."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(len(handles), LEGEND_COLUMNS)
    while columns:
        legend = figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
        columns -= 1
