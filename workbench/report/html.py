"""A self-contained page about a folder of plans and traces."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean, median

from workbench.drift import drift_between, drift_warning
from workbench.metrics import step_metrics
from workbench.plan.plan import Plan
from workbench.report.assemble import page
from workbench.report.charts import PlanTimes, accuracy_svg, bars_html
from workbench.report.compare import Comparison, Group, compare, timed, watched
from workbench.report.critical import CriticalPath, causes_html, critical_path_of
from workbench.report.folder import Entry, Folder
from workbench.report.front_html import searches_html
from workbench.report.page_data import data_elements, plan_id, plan_record, traces_of
from workbench.report.sortable import Cell, cell, number, sortable_table
from workbench.report.stage_table import folded_stages
from workbench.report.tables import (
    STAGE_HEADERS,
    TITLES,
    comparison_headers,
    interval_text,
    mebibytes,
    milliseconds,
    percent,
    row_cells,
    row_label,
)
from workbench.report.viewer import viewer_html
from workbench.report.what_if import WhatIf, what_if_html, what_if_record
from workbench.timing.provenance import interval_of, unmeasured_costs


def report_html(folder: Folder, *, what_if: WhatIf | None = None) -> str:
    """The page: an overview of all plans, then a section on each. Fetches nothing.

    Args:
        what_if: simulated neighbours of the job; None: no job was given.
    """
    entries = sorted(folder.entries, key=_speed)
    models = ", ".join(dict.fromkeys(entry.plan.model.name for entry in entries))
    paths = [_paths(entry) for entry in entries]
    sections = "".join(map(_section, range(1, len(entries) + 1), entries, paths))
    body = (
        f"<h1>{escape(models)}</h1>"
        f'<p class="lead">{_lead(entries)}</p>{_overview(entries)}{searches_html(folder.searches)}'
        f"{what_if_html(what_if)}{sections}"
        f"{_left_out(folder)}"
    )
    record = {
        "plans": [*map(plan_record, entries, paths)],
        "whatIf": what_if_record(what_if),
    }
    return page(title=escape(f"{models}: report"), body=body, data=data_elements(record, entries))


def _speed(entry: Entry) -> tuple[float, str]:
    times = _times(entry)
    shown = times.executed_median_s if times.executed_s else times.simulated_s
    return (float("inf") if shown is None else shown, entry.path.name)


def _times(entry: Entry) -> PlanTimes:
    return PlanTimes(
        label=entry.path.name.removesuffix(".json").removesuffix(".plan"),
        simulated_s=entry.simulated.iteration_s if entry.simulated else None,
        executed_s=tuple(trace.iteration_s for trace in timed(entry.executed)),
    )


def _lead(entries: Sequence[Entry]) -> str:
    counts = Counter(
        "both" if entry.simulated and entry.executed else "simulated" if entry.simulated else "other"
        for entry in entries
    )
    plans = f"{len(entries)} plan{'s' if len(entries) != 1 else ''}"
    counts_text = [f"{counts['both']} simulated and executed"] if counts["both"] else []
    counts_text += [f"{counts['simulated']} only simulated"] if counts["simulated"] else []
    text = f"{plans}: {', '.join(counts_text) or 'no prediction to hold against a run'}. Fastest first."
    return _drift(entries) + text + _accuracy(entries)


def _drift(entries: Sequence[Entry]) -> str:
    """Warning to show first if the machine drifted from its calibration, on average over the plans."""
    pairs = [(entry.simulated, timed(entry.executed)) for entry in entries if entry.simulated]
    drifts = [drift for pair in pairs if (drift := drift_between(*pair)) is not None]
    warning = drift_warning(fmean(drifts)) if drifts else None
    return "" if warning is None else f"<strong>{escape(warning)}.</strong> "


def _accuracy(entries: Sequence[Entry]) -> str:
    """Errors over all plans, beside the spread of the runs."""
    pairs = [_times(entry) for entry in entries if entry.simulated and entry.executed]
    medians = [(plan, plan.simulated_s, plan.executed_median_s) for plan in pairs]
    errors = [abs(simulated / executed - 1) for _, simulated, executed in medians if simulated and executed]
    if not errors:
        return ""
    spreads = [
        (max(p.executed_s) - min(p.executed_s)) / m for p, _, m in medians if m and len(p.executed_s) > 1
    ]
    spread_text = f", beside a median spread of the runs of {median(spreads):.1%}" if spreads else ""
    return f" Median absolute error {median(errors):.1%}, worst {max(errors):.1%}{spread_text}."


def _overview(entries: Sequence[Entry]) -> str:
    times = [_times(entry) for entry in entries]
    shown = [plan for plan in times if plan.simulated_s is not None or plan.executed_s]  # these come first
    figures = []
    if shown:
        figures.append(("Iteration time per plan", bars_html(shown)))
    if any(plan.is_compared for plan in times):
        figures.append(("Predicted against executed; numbers as in the bars", accuracy_svg(times)))
    parts = [f"<figure><h3>{title}</h3>{chart}</figure>" for title, chart in figures]
    return f'<div class="charts">{"".join(parts)}</div>{_plans(entries)}{_unmeasured(entries)}'


def _plans(entries: Sequence[Entry]) -> str:
    """A table of all plans."""
    headers = (
        "#",
        "plan",
        "strategy",
        "ranks",
        "stages",
        "simulated",
        "executed",
        "error",
        "idle",
        "peak memory",
    )
    rows = [_plan_cells(index, entry) for index, entry in enumerate(entries, 1)]
    return f"<h3>Plans</h3>{sortable_table(headers, [rows], left=3)}"


def _plan_cells(index: int, entry: Entry) -> tuple[Cell, ...]:
    times = _times(entry)
    simulated_s, executed_s = times.simulated_s, times.executed_median_s
    error = simulated_s / executed_s - 1 if simulated_s is not None and executed_s else None
    figures = step_metrics(entry.simulated) if entry.simulated else None
    idle = figures.bubble_fraction if figures else None
    peak = figures.peak_bytes if figures else None
    return (
        number(index),
        Cell(times.label, link=f"#plan={plan_id(entry)}"),
        Cell(entry.plan.strategy),
        number(len(entry.plan.ranks)),
        number(len(entry.plan.stages)),
        number(simulated_s, milliseconds),
        number(executed_s, milliseconds),
        number(error, lambda value: percent(value, signed=True)),
        number(idle, lambda value: percent(value, signed=False)),
        number(peak, mebibytes),
    )


def _unmeasured(entries: Sequence[Entry]) -> str:
    simulated = [entry.simulated for entry in entries if entry.simulated is not None]
    names = dict.fromkeys(name for trace in simulated for name in unmeasured_costs(trace))
    if not simulated:
        return ""
    if not names:
        return "<h3>Costs without a measurement</h3><p>None is listed in these traces.</p>"
    items = "".join(f"<li>{escape(name)}</li>" for name in names)
    return f'<h3>Costs without a measurement (scaled or sourced instead)</h3><ul class="plain">{items}</ul>'


def _paths(entry: Entry) -> dict[str, CriticalPath]:
    """Critical paths of the drawn traces, by their keys."""
    drawn = [each for each in traces_of(entry) if each.title]
    return {each.key: critical_path_of(entry.plan, each.trace) for each in drawn}


def _section(index: int, entry: Entry, paths: Mapping[str, CriticalPath]) -> str:
    comparison = compare(entry.simulated, entry.executed) if entry.simulated and entry.executed else None
    parts = [_cards(entry, comparison), viewer_html(entry), _watching(entry), _causes(paths)]
    parts += [_comparison(comparison, entry.plan), "<h3>Stages</h3>", _stages(entry.plan)]
    opened = " open" if index == 1 else ""
    return (
        f'<details id="plan-{plan_id(entry)}"{opened}><summary>'
        f"<h2>{index}. {escape(_times(entry).label)}</h2>"
        f'<span class="faint">{escape(entry.path.name)}, hash {plan_id(entry)}</span></summary>'
        f"{''.join(parts)}</details>"
    )


def _cards(entry: Entry, comparison: Comparison | None) -> str:
    plan = entry.plan
    cards = [("strategy", plan.strategy), ("ranks", str(len(plan.ranks))), ("stages", str(len(plan.stages)))]
    cards.append(("samples per step", str(len(plan.batch))))
    if entry.simulated:
        cards.append(("simulated", milliseconds(entry.simulated.iteration_s)))
        if interval_of(entry.simulated) is not None:
            cards.append(("80 % within", interval_text(entry.simulated)))
    if entry.emulated:
        cards.append(("emulated", milliseconds(entry.emulated.iteration_s)))
    if comparison is not None:
        total = comparison.total
        times = len(total.executed)
        label = "executed once" if times == 1 else f"executed, median of {times}"
        cards.append((label, milliseconds(total.executed_median)))
        cards.append(("error", percent(total.error_fraction, signed=True)))
        drifted = comparison.drifted
        if drifted is not None and drifted.drift is not None:
            cards.append(("drift of the machine", percent(drifted.drift, signed=True)))
            cards.append(("error without drift", percent(drifted.error_corrected, signed=True)))
        if times > 1:
            cards.append(("spread of the runs", percent(total.spread_fraction, signed=False)))
    html = "".join(f'<div class="card"><b>{escape(v)}</b><span>{k}</span></div>' for k, v in cards)
    return f'<div class="cards">{html}</div>'


def _watching(entry: Entry) -> str:
    samples = watched(entry.executed)
    if not samples or len(samples) == len(entry.executed):
        return ""
    return (
        '<p class="faint">Watching memory slows the executed step down; it is not one of the timed, and may '
        "go on beyond the right edge.</p>"
    )


def _causes(paths: Mapping[str, CriticalPath]) -> str:
    """Causes of the simulated path, or of the only one."""
    path = paths.get("simulated") or next(iter(paths.values()), None)
    return "" if path is None else f"<h3>What the step's time is</h3>{causes_html(path)}"


def _comparison(comparison: Comparison | None, plan: Plan) -> str:
    if comparison is None:
        return ""
    groups = [
        [(Cell(row_label(row, plan)), *map(cell, row_cells(row))) for row in rows]
        for group in Group
        if (rows := comparison.of(group))
    ]
    titles = [TITLES[group] for group in Group if comparison.of(group)]
    table = sortable_table(("of", *comparison_headers(comparison)), groups, titles=titles, left=1)
    return f"<h3>Simulated against executed</h3>{table}"


def _stages(plan: Plan) -> str:
    rows = [[cell(text) for text in row] for row in folded_stages(plan)]
    return sortable_table(STAGE_HEADERS, [rows], left=5)


def _left_out(folder: Folder) -> str:
    if not folder.left_out:
        return ""
    items = "".join(f"<li>{escape(reason)}</li>" for reason in folder.left_out)
    return f'<details><summary>Files that are not shown</summary><ul class="plain">{items}</ul></details>'
