"""Drawings as data: panels of a few kinds, put together in a grid. `experiments.harness.drawing` draws them.

A panel has one unit on each axis, which its label names. Labels of all panels are gathered into one
legend below the figure, never over data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.report.palette import HUES, NEUTRAL

BLUE, ORANGE, GREEN, PINK, SKY, RED = HUES
GREY, LIGHT, BLACK = NEUTRAL, "#C5CBD3", "#000000"

Limits = tuple[float | None, float | None]
Errors = tuple[Sequence[float], Sequence[float]]  # how far a value may be lower, and higher


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Title and axes of a panel.

    Args:
        title: of the panel.
        x, y: what the axes measure, with the unit.
        log: "x", "y" or "xy": the axes with logarithmic scales.
        x_limits, y_limits: None for an end chosen from the data.
        level: height of a thin horizontal line, such as 1 for ratios.
        slant: rotation of the names below the axis, in degrees.
    """

    title: str = ""
    x: str = ""
    y: str = ""
    log: str = ""
    x_limits: Limits = (None, None)
    y_limits: Limits = (None, None)
    level: float | None = None
    slant: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Bars of one colour and label, or of one each, with a bar per name of the panel."""

    values: Sequence[float]
    colour: str | Sequence[str]
    label: str | Sequence[str] = ""
    errors: Errors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Frame):
    """A group of bars per name, stacked with `stacked`."""

    names: Sequence[str]
    series: Sequence[Series]
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points and their connection: `style` "" for points only, `step` for piecewise constant values."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    label: str = ""
    style: str = "-"
    marker: str = ""
    width: float = 1.0
    step: bool = False
    errors: Errors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The area between two lines."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    label: str = ""
    colour: str = LIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Frame):
    """Lines and points over bands; `names` label the whole numbers of the horizontal axis."""

    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads(Frame):
    """A box from the first to the third quartile per name, with its median."""

    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Box:
    """One pass in a row of a timeline."""

    row: int
    module: str
    is_forward: bool
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(Frame):
    """A row per block of ranks, a hue per module, lighter for forwards."""

    boxes: Sequence[Box]


Panel = Bars | Lines | Spreads | Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A drawing of panels.

    Args:
        rows: panels row by row, equally many in each; None leaves a cell empty.
        title: above all panels.
        panel_inches: width and height of a panel.
        heights, widths: of rows and columns, in panels; all equal by default.
        shares_x, shares_y: which panels share limits: "none", "all", "row" or "col".
    """

    rows: Sequence[Sequence[Panel | None]]
    title: str = ""
    panel_inches: tuple[float, float] = (4.5, 3.6)
    heights: Sequence[float] = ()
    widths: Sequence[float] = ()
    shares_x: str = "none"
    shares_y: str = "none"


def cumulative(values: Sequence[float], colour: str, label: str = "") -> Line:
    """Cumulative distribution: for each value the share of all that are at most as large."""
    return Line(
        x=sorted(values),
        y=[(index + 1) / len(values) for index in range(len(values))],
        colour=colour,
        label=label,
    )


def timelines(panels: Mapping[str, Sequence[Box]], unit: str) -> Grid:
    """Stack timelines over a common scale."""
    rows = [
        [Timeline(title=f"{name}: {_end(boxes):.4g} {unit}", x=unit, y="block of ranks", boxes=boxes)]
        for name, boxes in panels.items()
    ]
    heights = [0.9 + 0.22 * (1 + max(box.row for box in boxes)) for boxes in panels.values()]
    return Grid(rows=rows, panel_inches=(13.0, 1.0), heights=heights, shares_x="all")


def _end(boxes: Sequence[Box]) -> float:
    return max(box.end for box in boxes)


def wrapped(panels: Sequence[Panel], num_columns: int) -> list[list[Panel | None]]:
    """Arrange panels row by row, padding the last row."""
    cells: list[Panel | None] = [*panels, *[None] * (-len(panels) % num_columns)]
    return [cells[start : start + num_columns] for start in range(0, len(cells), num_columns)]
