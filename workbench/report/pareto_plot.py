"""Plot plans by cost: step time against memory, GPUs and dollars, with the Pareto front numbered."""

from collections.abc import Callable, Iterator, Sequence
from math import hypot
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from workbench.report.palette import EXECUTED, INK, LIGHT, NEUTRAL, PLOT_STYLE
from workbench.report.search_points import Record, Tied, points_of, tied_front
from workbench.search.objectives.pareto import Point
from workbench.units import GIB, MIB

FORMATS = ("png", "pdf")
MOST_NAMED = 16  # points of the front in the legend
LABEL_PIXELS = 16.0  # minimum distance of labels
NAMES_WIDTH = 100  # letters of a line of the legend
WIDE = 10.0  # ratio of times, from which the axis is logarithmic


Position = tuple[float, float]


class Panel(NamedTuple):
    """A cost to draw against time."""

    title: str
    cost: Callable[[Point], float]


def draw_search(record: Record, path: Path) -> None:
    """Draw the plans of a search's record; see `draw_pareto`."""
    draw_pareto(points_of(record["candidates"]), path, title=f"job {record['job']}")


def check_picture(path: Path) -> None:
    """Raise ValueError unless the file name is one of a supported picture format."""
    if path.suffix.removeprefix(".").lower() not in FORMATS:
        raise ValueError(f"{path}: want a picture named .png or .pdf, got {path.suffix or 'no suffix'!r}")


def draw_pareto(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Draw a PNG or PDF by its suffix: a panel for each of memory, GPUs and, if there are any, dollars.

    The front is that of all costs together, so a point that is beaten within a panel may be on it.

    Raises:
        ValueError: no points, another suffix, or dollars of some points only.
    """
    check_picture(path)
    if not points:
        raise ValueError(f"{path}: no plan of the search has a time and a memory to be drawn")
    tied = tied_front(points)
    panels = [_memory_panel(points)]
    panels.append(Panel("GPUs", lambda point: point.gpus))
    if points[0].dollars is not None:
        panels.append(Panel("dollars a step", lambda point: point.dollars or 0.0))
    with rc_context(PLOT_STYLE):
        figure = Figure(
            figsize=(3.6 * len(panels) + 0.4, 3.6 + 0.17 * _num_lines(tied)), layout="constrained"
        )
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw_panel(axes, panel, points, tied)
        figure.suptitle(f"{title}: {_counted(points, tied)}", x=0.01, ha="left", fontsize=10)
        figure.supxlabel(_legend(tied), x=0.01, ha="left", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.removeprefix(".").lower()
        software: dict[str, Any] = {"Software": None} if kind == "png" else {"CreationDate": None}
        figure.savefig(path, format=kind, dpi=150, metadata=software)


def _memory_panel(points: Sequence[Point]) -> Panel:
    name, size = ("GiB", GIB) if max(point.memory_bytes for point in points) >= GIB else ("MiB", MIB)
    return Panel(f"{name} on the fullest GPU", lambda point: point.memory_bytes / size)


def _counted(points: Sequence[Point], tied: Sequence[Tied]) -> str:
    plans = f"{len(points):,} plan{'s' if len(points) != 1 else ''}"
    return f"{plans}; in colour the {len(tied)} that no other beats in everything"


def _num_lines(tied: Sequence[Tied]) -> int:
    return min(len(tied), MOST_NAMED + 1)


def _legend(tied: Sequence[Tied]) -> str:
    lines = [
        f"{number}  {shorten(', '.join(each.names), NAMES_WIDTH, placeholder=' ...')}"
        for number, each in enumerate(tied[:MOST_NAMED], 1)
    ]
    more = len(tied) - MOST_NAMED
    return "\n".join(lines + ([f"and {more:,} more"] if more > 0 else []))


def _draw_panel(axes: Axes, panel: Panel, points: Sequence[Point], tied: Sequence[Tied]) -> None:
    axes.scatter(
        [point.time_s for point in points],
        [panel.cost(point) for point in points],
        s=18,
        facecolors="none",
        edgecolors=NEUTRAL,
        linewidths=0.8,
    )
    times_s = [each.point.time_s for each in tied]
    costs = [panel.cost(each.point) for each in tied]
    axes.scatter(times_s, costs, s=26, color=EXECUTED, zorder=3)
    all_s = [point.time_s for point in points]
    if max(all_s) > WIDE * min(all_s) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="seconds of a step", ylabel=panel.title)
    axes.set_ylim(bottom=0, top=1.1 * max(panel.cost(point) for point in points) or 1.0)
    if panel.title == "GPUs":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, linewidth=0.5, color=LIGHT["line"])
    axes.set_axisbelow(True)
    for text, position in _labels(axes, list(zip(times_s, costs, strict=True))[:MOST_NAMED]):
        axes.annotate(text, position, xytext=(4, 3), textcoords="offset points", color=INK, fontsize=8)


def _labels(axes: Axes, positions: Sequence[Position]) -> Iterator[tuple[str, Position]]:
    """Numbers of positions; those that would overlap are joined at the first of them. Axis limits must
    be set.
    """
    pixels = axes.transData.transform(positions)
    labels: list[tuple[list[str], int]] = []
    for number, pixel in enumerate(pixels):
        near = (numbers for numbers, first in labels if hypot(*(pixel - pixels[first])) < LABEL_PIXELS)
        overlapping = next(near, None)
        if overlapping is None:
            labels.append(([str(number + 1)], number))
        else:
            overlapping.append(str(number + 1))
    return ((", ".join(numbers), positions[first]) for numbers, first in labels)
