"""Charts of the report in the page's own elements and colours: iteration times, and predicted over
executed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from math import cos, hypot, pi, sin
from statistics import median

from workbench.report.tables import milliseconds
from workbench.report.timeline import nice_step
from workbench.units import ms

TOLERANCE = 0.10  # the band drawn around the diagonal
SIDE, LEFT, BOTTOM, EDGE = 380, 58, 42, 8  # pixels: of the square, and around it
POINT = 5.0  # radius
LETTER_WIDTH, LABEL_HEIGHT = 7.0, 13.0
DIRECTIONS = 16  # of candidate label positions on each ring


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """Iteration times of one plan. `executed_s` is empty if it was only simulated."""

    label: str
    simulated_s: float | None
    executed_s: tuple[float, ...] = ()

    @property
    def executed_median_s(self) -> float | None:
        return median(self.executed_s) if self.executed_s else None

    @property
    def is_compared(self) -> bool:
        return self.simulated_s is not None and bool(self.executed_s)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the page, in pixels."""

    left: float
    top: float
    width: float
    height: float

    def meets(self, other: "Box") -> bool:
        return (
            self.left < other.left + other.width
            and other.left < self.left + self.width
            and self.top < other.top + other.height
            and other.top < self.top + self.height
        )

    def is_inside(self, other: "Box") -> bool:
        return (
            other.left <= self.left
            and other.top <= self.top
            and self.left + self.width <= other.left + other.width
            and self.top + self.height <= other.top + other.height
        )


def bars_html(plans: Sequence[PlanTimes]) -> str:
    """Bars of every plan's iteration time, simulated above executed, in the order given; as wide as the
    page.
    """
    most_s = max(chain([0.0], *(_times_s(plan) for plan in plans))) or 1.0
    rows = "".join(
        f'<li><span class="label">{number}&ensp;{escape(plan.label)}</span>'
        f'<span class="pair">{_bars(plan, most_s)}</span></li>'
        for number, plan in enumerate(plans, 1)
    )
    return f'{_key(plans)}<ol class="bars">{rows}</ol>'


def _times_s(plan: PlanTimes) -> tuple[float, ...]:
    return (*((plan.simulated_s,) if plan.simulated_s is not None else ()), *plan.executed_s)


def _key(plans: Sequence[PlanTimes]) -> str:
    parts = []
    if any(plan.simulated_s is not None for plan in plans):
        parts.append('<span><i class="simulated"></i>simulated</span>')
    if any(plan.executed_s for plan in plans):
        parts.append('<span><i class="executed"></i>executed: median, and a line over the range</span>')
    return f'<p class="key">{"".join(parts)}</p>'


def _bars(plan: PlanTimes, most_s: float) -> str:
    parts = []
    if plan.simulated_s is not None:
        parts.append(_bar("simulated", (plan.simulated_s,), most_s))
    if plan.executed_s:
        parts.append(_bar("executed", plan.executed_s, most_s))
    return "".join(parts)


def _bar(style: str, values_s: Sequence[float], most_s: float) -> str:
    """A bar up to the median; the line over the range is positioned relative to the bar's width."""
    middle_s, low_s, high_s = median(values_s), min(values_s), max(values_s)
    line = ""
    if high_s > low_s and middle_s > 0:
        left, width = low_s / middle_s, (high_s - low_s) / middle_s
        line = f'<i style="left:{left:.2%};width:{width:.2%}"></i>'
    text_left = f"left:{max(high_s / middle_s, 1):.2%}" if middle_s > 0 else "left:0"
    return (
        f'<span class="bar {style}" style="width:{middle_s / most_s:.2%}">{line}'
        f'<b style="{text_left}">{milliseconds(middle_s)}</b></span>'
    )


def accuracy_svg(plans: Sequence[PlanTimes]) -> str:
    """Predicted over executed iteration time; lines span the repetitions, the band is +-10 %.

    Points are labelled with the plan's number in the order given, as in `bars_html`, without overlap.

    Raises:
        ValueError: no plan is both simulated and executed.
    """
    pairs = [(number, plan) for number, plan in enumerate(plans, 1) if plan.is_compared]
    if not pairs:
        raise ValueError("accuracy plot: want at least one plan both simulated and executed, got none")
    most_s = 1.1 * max(max(_times_s(plan)) for _, plan in pairs)
    scale = SIDE / most_s
    points = [
        (LEFT + scale * (plan.executed_median_s or 0.0), EDGE + SIDE - scale * (plan.simulated_s or 0.0))
        for _, plan in pairs
    ]
    ranges = [
        Box(
            LEFT + scale * min(plan.executed_s),
            y - 1,
            scale * (max(plan.executed_s) - min(plan.executed_s)),
            2,
        )
        for (_, plan), (_, y) in zip(pairs, points, strict=True)
    ]
    up = f"predicted, ms; band: within {TOLERANCE:.0%}"
    parts = [_band(), *axes_svg((ms(most_s), "executed, ms"), (ms(most_s), up))]
    parts += [
        f'<rect class="range" x="{box.left:.1f}" y="{box.top + 0.3:.1f}" width="{box.width:.1f}" '
        'height="1.4"/>'
        for box in ranges
    ]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{POINT}"/>' for x, y in points]
    parts += labels_svg([str(number) for number, _ in pairs], points, ranges)
    return scatter_svg("predicted over executed iteration time, a point for each plan", parts)


def _band() -> str:
    """The area where predictions are within the tolerance, clipped to the square."""
    left, bottom, side = LEFT, EDGE + SIDE, SIDE
    right, top, less = left + side, EDGE, 1 - TOLERANCE
    reach = side / (1 + TOLERANCE)  # where the upper edge leaves the square
    corners = [(left, bottom), (right, bottom - less * side), (right, top), (left + reach, top)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    even = f'<line class="even" x1="{left}" y1="{bottom}" x2="{right}" y2="{top}"/>'
    return f'<polygon class="band" points="{points}"/>{even}'


def axes_svg(across: tuple[float, str], up: tuple[float, str]) -> Iterator[str]:
    """Grid, numbers and titles of a square chart's axes: (largest value, title) of each."""
    bottom, middle = EDGE + SIDE, EDGE + SIDE / 2
    for position, label in _ticks(across[0]):
        x = LEFT + SIDE * position
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{EDGE}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
    for position, label in _ticks(up[0]):
        y = bottom - SIDE * position
        yield f'<line class="grid" x1="{LEFT}" x2="{LEFT + SIDE}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<text x="{LEFT + SIDE / 2}" y="{bottom + 34}" text-anchor="middle">{across[1]}</text>'
    rotation = f'transform="rotate(-90 12 {middle})"'
    yield f'<text x="12" y="{middle}" text-anchor="middle" {rotation}>{up[1]}</text>'


def _ticks(most: float) -> Iterator[tuple[float, str]]:
    """(fraction of the axis, label)."""
    step = nice_step(most, 5)
    for index in range(int(most / step * (1 + 1e-12)) + 1):
        yield index * step / most, f"{index * step:,g}"


def scatter_svg(about: str, parts: Iterable[str]) -> str:
    """A square chart of these elements; `about` is its description for screen readers."""
    size = f"{LEFT + SIDE + EDGE} {EDGE + SIDE + BOTTOM}"
    head = f'<svg class="scatter" viewBox="0 0 {size}" role="img" aria-label="{about}">'
    return f"{head}{''.join(parts)}</svg>"


def labels_svg(
    texts: Sequence[str], points: Sequence[tuple[float, float]], ranges: Sequence[Box] = ()
) -> Iterator[str]:
    """Labels beside the points without overlap; a distant label gets a line to its point."""
    area = Box(LEFT, EDGE, SIDE, SIDE)
    for text, (x, y), box in zip(texts, points, label_boxes(texts, points, area, ranges), strict=True):
        if box is None:
            continue
        middle = (box.left + box.width / 2, box.top + box.height / 2)
        if hypot(middle[0] - x, middle[1] - y) > POINT + 1.6 * LABEL_HEIGHT:
            ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{middle[0]:.1f}" y2="{middle[1]:.1f}"'
            yield f'<line class="leader" {ends}/>'
        yield f'<text x="{middle[0]:.1f}" y="{middle[1] + 4:.1f}" text-anchor="middle">{text}</text>'


def label_boxes(
    texts: Sequence[str], points: Sequence[tuple[float, float]], area: Box, drawn: Sequence[Box] = ()
) -> tuple[Box | None, ...]:
    """A box for the label of every point: near it, inside the area, over no point and no other label.

    Boxes are tried on rings around the point, nearest first, each starting at its upper right. None if the
    area is full.

    Args:
        drawn: other elements to avoid.

    Complexity: O(points^2) for each ring that is tried.
    """
    occupied = [*drawn, *(Box(x - POINT, y - POINT, 2 * POINT, 2 * POINT) for x, y in points)]
    boxes: list[Box | None] = []
    for text, point in zip(texts, points, strict=True):
        width = LETTER_WIDTH * len(text)
        box = next((b for b in _around(point, width, area) if not any(map(b.meets, occupied))), None)
        boxes.append(box)
        occupied += [] if box is None else [box]
    return tuple(boxes)


def _around(point: tuple[float, float], width: float, area: Box) -> Iterator[Box]:
    """Boxes inside the area around a point, ring by ring."""
    rings = int(hypot(area.width, area.height) / LABEL_HEIGHT) + 1
    for ring in range(rings):
        away = ring * LABEL_HEIGHT
        for index in range(DIRECTIONS):
            turn = 2 * pi * index / DIRECTIONS - pi / 4
            x = point[0] + cos(turn) * (POINT + 2 + width / 2 + away)
            y = point[1] + sin(turn) * (POINT + 2 + LABEL_HEIGHT / 2 + away)
            box = Box(x - width / 2, y - LABEL_HEIGHT / 2, width, LABEL_HEIGHT)
            if box.is_inside(area):
                yield box
