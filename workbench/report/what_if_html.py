"""What was simulated of a job's neighbours, for the page: sliders, and a table of all of it."""

from html import escape
from typing import Any

from workbench.metrics import step_metrics
from workbench.plan.plan import Plan
from workbench.report.sortable import Cell, number, sortable_table
from workbench.report.tables import mebibytes, milliseconds
from workbench.report.what_if import Axis, Point, WhatIf
from workbench.timing.provenance import interval_of


def what_if_html(found: WhatIf | None) -> str:
    """The section of the page; says how many neighbours were tried, of how many."""
    if found is None:
        return (
            '<h3>What if</h3><p class="faint">Name the job, and its neighbours are simulated: '
            "workbench report FOLDER --job JOB</p>"
        )
    tried = len(found.points)
    refused = sum(point.candidate.plan is None for point in found.points)
    told = (
        f"{tried} of {found.num_neighbours} neighbours of job {found.job} were planned by {found.strategy}, "
        f"the nearest first, in at most {found.seconds:g} s: {tried - refused} were simulated, {refused} "
        "have no plan. Sliders stop only there; nothing in between is guessed."
    )
    if not tried:
        return f"<h3>What if</h3><p>{escape(told)}</p>"
    sliders = "".join(_slider(place, axis) for place, axis in enumerate(found.axes))
    return (
        f'<section id="what-if"><h3>What if</h3><p class="faint">{escape(told)}</p>'
        f'<div class="sliders">{sliders}</div><p class="snapped" role="status"></p>'
        f'<div class="cards outcome" aria-live="polite"></div><pre class="words faint"></pre>'
        f"<details><summary>All {tried} neighbours</summary>{_table(found)}</details></section>"
    )


def _slider(place: int, axis: Axis) -> str:
    name = escape(axis.name)
    return (
        f'<label data-axis="{place}"><span>{name}<output></output></span>'
        f'<input type="range" min="0" max="0" step="1" value="0" aria-label="{name}"></label>'
    )


def _table(found: WhatIf) -> str:
    headers = (*(axis.name for axis in found.axes), "iteration", "samples/s", "peak memory", "ranks used")
    rows = [(*_place_cells(found, point), *_outcome_cells(point)) for point in found.points]
    return sortable_table(headers, [rows], marks=lambda place: f' data-point="{place}"')


def _place_cells(found: WhatIf, point: Point) -> tuple[Cell, ...]:
    pairs = zip(found.axes, point.at, strict=True)
    return tuple(Cell(axis.labels[at], axis.values[at]) for axis, at in pairs)


def _outcome_cells(point: Point) -> tuple[Cell, ...]:
    candidate = point.candidate
    if candidate.trace is None or candidate.plan is None:
        return Cell("no plan"), Cell("-"), Cell("-"), Cell("-")
    rate = len(candidate.plan.batch) / candidate.trace.iteration_s
    return (
        number(candidate.trace.iteration_s, milliseconds),
        number(rate, "{:.3g}".format),
        number(step_metrics(candidate.trace).peak_bytes, mebibytes),
        number(len(candidate.plan.ranks)),
    )


def what_if_record(found: WhatIf | None) -> dict[str, Any] | None:
    """Axes and points for the page's script: seconds, bytes; None where nothing was asked."""
    if found is None:
        return None
    return {
        "axes": [{"name": a.name, "values": a.values, "labels": a.labels} for a in found.axes],
        "points": [_point_record(point) for point in found.points],
    }


def _point_record(point: Point) -> dict[str, Any]:
    candidate = point.candidate
    words = "\n".join(f"{key}: {value:g}" for key, value in point.words.items())
    told = f"In the job file:\n{words}" if words else "The job file as it is."
    record: dict[str, Any] = {"at": point.at, "words": told, "refusal": candidate.refusal or None}
    if candidate.trace is None or candidate.plan is None:
        return record
    interval = interval_of(candidate.trace)
    return record | {
        "iteration_s": candidate.trace.iteration_s,
        "low_s": None if interval is None else interval.low_s,
        "high_s": None if interval is None else interval.high_s,
        "samples_per_s": len(candidate.plan.batch) / candidate.trace.iteration_s,
        "peak_bytes": step_metrics(candidate.trace).peak_bytes,
        "ranks": len(candidate.plan.ranks),
        "stages": _stage_counts(candidate.plan),
    }


def _stage_counts(plan: Plan) -> str:
    """`1 + 1 + 10`: stages of the first replica of every module."""
    firsts = {module.name: plan.replicas(module.name)[0] for module in plan.model.modules}
    return " + ".join(str(len(plan.chain[name, replica])) for name, replica in firsts.items())
