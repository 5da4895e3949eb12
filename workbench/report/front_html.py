"""Searches on the report's page: every plan by time and memory, and those that no other beats."""

from collections.abc import Iterator, Sequence
from html import escape

from workbench.report.charts import BOTTOM, EDGE, LEFT, POINT, SIDE, Box, label_boxes
from workbench.report.folder import Search
from workbench.report.search_points import Tied, tied_front
from workbench.report.sortable import Cell, number, sortable_table
from workbench.report.tables import mebibytes, milliseconds
from workbench.report.timeline import nice_step
from workbench.search.objectives.pareto import Point
from workbench.units import GIB, ms

ROOM = 1.08  # of an axis, over the largest value


def searches_html(searches: Sequence[Search]) -> str:
    """A chart and a table for each search of the folder; empty where there is none."""
    return "".join(map(_search_html, searches))


def _search_html(search: Search) -> str:
    points = search.points
    tied = tied_front(points)
    title = f"{escape(search.path.name)}: {len(points)} plans by {escape(search.objective)}"
    chart = front_svg(points, tied) if points else "<p>No plan of it has a time and a memory.</p>"
    caption = "Every plan by time and memory; in colour those that no other beats in time, memory, GPUs"
    money = " and dollars" if points and points[0].dollars is not None else ""
    figure = f"<figure><h3>{caption}{money}; numbers as below</h3>{chart}</figure>"
    return f"<h2>Search</h2><p>{title}</p>{figure}{_table(tied)}"


def _table(tied: Sequence[Tied]) -> str:
    headers = ("#", "plan", "step", "peak memory", "GPUs", "dollars a step")
    rows = [
        (
            number(index),
            Cell(", ".join(names)),
            number(point.time_s, milliseconds),
            number(point.memory_bytes, mebibytes),
            number(point.gpus, lambda value: f"{value:g}"),
            number(point.dollars, lambda value: f"{value:.4g}"),
        )
        for index, (names, point) in enumerate(tied, 1)
    ]
    return sortable_table(headers, [rows], left=2)


def front_svg(points: Sequence[Point], tied: Sequence[Tied]) -> str:
    """Memory of the fullest GPU over the time of a step; the front is numbered in its order.

    Args:
        points: one at least.
        tied: their front.
    """
    most_s = ROOM * max(point.time_s for point in points) or 1.0
    most_bytes = ROOM * max(point.memory_bytes for point in points) or 1.0

    def place(point: Point) -> tuple[float, float]:
        return LEFT + SIDE * point.time_s / most_s, EDGE + SIDE * (1 - point.memory_bytes / most_bytes)

    chosen, costs = [place(each.point) for each in tied], {each.point.costs for each in tied}
    others = [place(point) for point in points if point.costs not in costs]
    parts = [*_axes(most_s, most_bytes)]
    parts += [f'<circle class="beaten" cx="{x:.1f}" cy="{y:.1f}" r="{POINT - 1}"/>' for x, y in others]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{POINT}"/>' for x, y in chosen]
    texts = [str(index) for index in range(1, len(chosen) + 1)]
    for text, box in zip(texts, label_boxes(texts, chosen, Box(LEFT, EDGE, SIDE, SIDE)), strict=True):
        if box is not None:
            middle = f'x="{box.left + box.width / 2:.1f}" y="{box.top + box.height / 2 + 4:.1f}"'
            parts.append(f'<text {middle} text-anchor="middle">{text}</text>')
    size = f"{LEFT + SIDE + EDGE} {EDGE + SIDE + BOTTOM}"
    return (
        f'<svg class="scatter" viewBox="0 0 {size}" role="img" aria-label="memory over step time, a point '
        f'for each plan of the search">{"".join(parts)}</svg>'
    )


def _axes(most_s: float, most_bytes: float) -> Iterator[str]:
    bottom, middle = EDGE + SIDE, EDGE + SIDE / 2
    for at, label in _ticks(ms(most_s)):
        x = LEFT + SIDE * at
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{EDGE}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
    for at, label in _ticks(most_bytes / GIB):
        y = bottom - SIDE * at
        yield f'<line class="grid" x1="{LEFT}" x2="{LEFT + SIDE}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<text x="{LEFT + SIDE / 2}" y="{bottom + 34}" text-anchor="middle">step, ms</text>'
    turned = f'transform="rotate(-90 12 {middle})"'
    yield f'<text x="12" y="{middle}" text-anchor="middle" {turned}>fullest GPU, GiB</text>'


def _ticks(most: float) -> Iterator[tuple[float, str]]:
    """(part of the axis, what is written there)."""
    step = nice_step(most, 5)
    for index in range(int(most / step * (1 + 1e-12)) + 1):
        yield index * step / most, f"{index * step:,g}"
