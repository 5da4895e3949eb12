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
    """What every panel says of its axes.

    Args:
        title: of the panel.
        x, y: what the axes measure, with the unit.
        log: "x", "y" or "xy": the axes with logarithmic scales.
        x_limits, y_limits: None for an end that the data decide.
        level: where a thin horizontal line stands, such as 1 for ratios.
        slant: degrees by which names below the axis are turned.
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
    """Bars of one colour and label, or of one each, one bar for each name of the panel."""

    values: Sequence[float]
    colour: str | Sequence[str]
    label: str | Sequence[str] = ""
    errors: Errors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Frame):
    """A group of bars for each name, or with `stacked` one bar on the other."""

    names: Sequence[str]
    series: Sequence[Series]
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points and what joins them: `style` "" for points alone, `step` for values that hold until the next."""

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
    """What lies between two lines."""

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
    """A box from the first to the third quartile for each name, with its median."""

    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Box:
    """One pass on a row of a timeline."""

    row: int
    module: str
    is_forward: bool
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(Frame):
    """A row for every block of ranks, a hue for every module, lighter for forwards."""

    boxes: Sequence[Box]


Panel = Bars | Lines | Spreads | Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One drawing.

    Args:
        rows: panels, row by row, as many in each; None leaves a place empty.
        title: above all of them.
        panel_inches: width and height of a panel.
        heights, widths: of rows and columns, in panels; all alike by default.
        shares_x, shares_y: which panels have the same limits: "none", "all", "row" or "col".
    """

    rows: Sequence[Sequence[Panel | None]]
    title: str = ""
    panel_inches: tuple[float, float] = (4.5, 3.6)
    heights: Sequence[float] = ()
    widths: Sequence[float] = ()
    shares_x: str = "none"
    shares_y: str = "none"


def cumulative(values: Sequence[float], colour: str, label: str = "") -> Line:
    """Over each value the share of all that are at most as large."""
    return Line(
        x=sorted(values),
        y=[(index + 1) / len(values) for index in range(len(values))],
        colour=colour,
        label=label,
    )


def timelines(panels: Mapping[str, Sequence[Box]], unit: str) -> Grid:
    """One timeline under the other over one scale."""
    rows = [
        [Timeline(title=f"{name}: {_end(boxes):.4g} {unit}", x=unit, y="block of ranks", boxes=boxes)]
        for name, boxes in panels.items()
    ]
    heights = [0.9 + 0.22 * (1 + max(box.row for box in boxes)) for boxes in panels.values()]
    return Grid(rows=rows, panel_inches=(13.0, 1.0), heights=heights, shares_x="all")


def _end(boxes: Sequence[Box]) -> float:
    return max(box.end for box in boxes)


def wrapped(panels: Sequence[Panel], num_columns: int) -> list[list[Panel | None]]:
    """Panels row by row, the last row filled up."""
    places: list[Panel | None] = [*panels, *[None] * (-len(panels) % num_columns)]
    return [places[at : at + num_columns] for at in range(0, len(places), num_columns)]
