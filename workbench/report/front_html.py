"""Searches on the report's page: every plan by time and memory, with the Pareto front."""

from collections.abc import Sequence
from html import escape

from workbench.report.charts import EDGE, LEFT, POINT, SIDE, axes_svg, labels_svg, scatter_svg
from workbench.report.folder import Search
from workbench.report.search_points import Tied, tied_front
from workbench.report.sortable import Cell, number, sortable_table
from workbench.report.tables import mebibytes, milliseconds
from workbench.search.objectives.pareto import Point
from workbench.units import GIB, ms

ROOM = 1.08  # length of an axis over its largest value


def searches_html(searches: Sequence[Search]) -> str:
    """A chart and a table for each search of the folder; empty without any."""
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
    """Memory of the fullest GPU over step time; the front is numbered in its order.

    Args:
        points: at least one.
        tied: their front.
    """
    most_s = ROOM * max(point.time_s for point in points) or 1.0
    most_bytes = ROOM * max(point.memory_bytes for point in points) or 1.0

    def position(point: Point) -> tuple[float, float]:
        return LEFT + SIDE * point.time_s / most_s, EDGE + SIDE * (1 - point.memory_bytes / most_bytes)

    on_front, costs = [position(each.point) for each in tied], {each.point.costs for each in tied}
    others = [position(point) for point in points if point.costs not in costs]
    parts = [*axes_svg((ms(most_s), "step, ms"), (most_bytes / GIB, "fullest GPU, GiB"))]
    parts += [f'<circle class="beaten" cx="{x:.1f}" cy="{y:.1f}" r="{POINT - 1}"/>' for x, y in others]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{POINT}"/>' for x, y in on_front]
    parts += labels_svg([str(index) for index in range(1, len(on_front) + 1)], on_front)
    return scatter_svg("memory over step time, a point for each plan of the search", parts)
