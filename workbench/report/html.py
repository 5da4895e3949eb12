"""One self-contained page about a folder of plans and traces."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from statistics import median
from string import Template

from workbench.plan.plan import Plan
from workbench.report.compare import Comparison, Group, compare, timed, watched
from workbench.report.folder import Entry, Folder
from workbench.report.plots import MOST_MEMORY_PLOTS, PlanTimes, accuracy_svg, memory_svg, ranking_svg
from workbench.report.tables import (
    STAGE_HEADERS,
    TITLES,
    comparison_headers,
    interval_text,
    milliseconds,
    percent,
    row_cells,
    row_label,
    stage_cells,
)
from workbench.report.timeline import MOST_ROWS, legend_html, timeline_rows, timeline_svg
from workbench.timing.provenance import interval_of, unmeasured_costs
from workbench.trace import Trace


def report_html(folder: Folder) -> str:
    """The page: an overview of all plans, then a section on each. Links to nothing outside itself."""
    entries = sorted(folder.entries, key=_speed)
    models = ", ".join(dict.fromkeys(entry.plan.model.name for entry in entries))
    sections = "".join(_section(index, entry) for index, entry in enumerate(entries, 1))
    body = (
        f"<h1>{escape(models)}</h1>"
        f'<p class="lead">{_lead(entries)}</p>{_overview(entries)}{sections}{_left_out(folder)}'
    )
    page = files("workbench.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(page).substitute(title=escape(f"{models}: report"), body=body)


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
    told = [f"{counts['both']} simulated and executed"] if counts["both"] else []
    told += [f"{counts['simulated']} only simulated"] if counts["simulated"] else []
    text = f"{plans}: {', '.join(told) or 'no prediction to hold against a run'}. Fastest first."
    return text + _accuracy(entries)


def _accuracy(entries: Sequence[Entry]) -> str:
    """Errors over all plans, beside the spread of the runs themselves."""
    pairs = [_times(entry) for entry in entries if entry.simulated and entry.executed]
    medians = [(plan, plan.simulated_s, plan.executed_median_s) for plan in pairs]
    errors = [abs(simulated / executed - 1) for _, simulated, executed in medians if simulated and executed]
    if not errors:
        return ""
    spreads = [
        (max(p.executed_s) - min(p.executed_s)) / m for p, _, m in medians if m and len(p.executed_s) > 1
    ]
    beside = f", beside a median spread of the runs of {median(spreads):.1%}" if spreads else ""
    return f" Median absolute error {median(errors):.1%}, worst {max(errors):.1%}{beside}."


def _overview(entries: Sequence[Entry]) -> str:
    times = [_times(entry) for entry in entries]
    shown = [plan for plan in times if plan.simulated_s is not None or plan.executed_s]  # the others are last
    figures = []
    if shown:
        figures.append(("Iteration time per plan", ranking_svg(shown)))
    if any(plan.simulated_s is not None and plan.executed_s for plan in times):
        figures.append(("Predicted against executed; numbers as in the bars", accuracy_svg(times)))
    parts = [f"<figure><h3>{title}</h3>{svg}</figure>" for title, svg in figures]
    return f'<div class="plots">{"".join(parts)}</div>' + _unmeasured(entries)


def _unmeasured(entries: Sequence[Entry]) -> str:
    simulated = [entry.simulated for entry in entries if entry.simulated is not None]
    names = dict.fromkeys(name for trace in simulated for name in unmeasured_costs(trace))
    if not simulated:
        return ""
    if not names:
        return "<h3>Costs without a measurement</h3><p>None is listed in these traces.</p>"
    items = "".join(f"<li>{escape(name)}</li>" for name in names)
    return f'<h3>Costs without a measurement (scaled or sourced instead)</h3><ul class="plain">{items}</ul>'


def _section(index: int, entry: Entry) -> str:
    comparison = compare(entry.simulated, entry.executed) if entry.simulated and entry.executed else None
    parts = [_cards(entry, comparison), _timelines(entry)]
    parts += [_memory(entry), _comparison(comparison, entry.plan)]
    parts += ["<h3>Stages</h3>", _stages(entry.plan)]
    opened = " open" if index == 1 else ""
    return (
        f"<details{opened}><summary><h2>{index}. {escape(_times(entry).label)}</h2>"
        f'<span class="faint">{escape(entry.path.name)}, hash {entry.plan_hash[:12]}</span></summary>'
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
        cards.append((f"executed, median of {len(total.executed)}", milliseconds(total.executed_median)))
        cards.append(("error", percent(total.error_fraction, signed=True)))
        found = comparison.drifted
        if found is not None and found.drift is not None:
            cards.append(("drift of the machine", percent(found.drift, signed=True)))
            cards.append(("error without drift", percent(found.error_corrected, signed=True)))
        cards.append(("spread of the runs", percent(total.spread_fraction, signed=False)))
    shown = "".join(f'<div class="card"><b>{escape(v)}</b><span>{k}</span></div>' for k, v in cards)
    return f'<div class="cards">{shown}</div>'


def _timelines(entry: Entry) -> str:
    traces = [("Simulated", entry.simulated)] if entry.simulated else []
    if entry.executed:
        times = timed(entry.executed)
        repetition = f"Executed, the run nearest the median of {len(times)}"
        traces.append((repetition if len(times) > 1 else "Executed", _middle(times)))
    if entry.emulated:
        traces.append(("Emulated: actions timed alone, one after the other, on one device", entry.emulated))
    if not traces:
        return "<p>Not simulated and not executed.</p>"
    scale_s = max(trace.iteration_s for _, trace in traces if trace)
    strips = "".join(
        f'<div class="strip"><b>{title}</b><figure>{timeline_svg(entry.plan, trace, scale_s=scale_s)}'
        "</figure></div>"
        for title, trace in traces
        if trace
    )
    rows = timeline_rows(entry.plan)
    more = f" {len(rows) - MOST_ROWS} more rows are not drawn." if len(rows) > MOST_ROWS else ""
    several = " A row of several ranks shows the first." if any(len(row.ranks) > 1 for row in rows) else ""
    return (
        f"<h3>Timelines, one scale</h3>{legend_html(entry.plan)}{strips}"
        f'<p class="faint">Thin lanes below a rank: gradient reduction, then messages it sends.'
        f"{several}{more}</p>"
    )


def _middle(traces: Sequence[Trace]) -> Trace:
    """The trace with the (lower) median iteration time."""
    return sorted(traces, key=lambda trace: trace.iteration_s)[(len(traces) - 1) // 2]


def _memory(entry: Entry) -> str:
    samples = watched(entry.executed)
    executed = _middle(samples) if samples else None
    traces = [trace for trace in (entry.simulated, executed) if trace is not None]
    if not any(trace.memory for trace in traces):
        return ""
    rows = timeline_rows(entry.plan)
    note = f" (first {MOST_MEMORY_PLOTS} of {len(rows)} rows)" if len(rows) > MOST_MEMORY_PLOTS else ""
    svg = memory_svg(rows, entry.simulated, executed)
    slower = '<p class="faint">Watching memory slows the executed step down; it is not one of the timed.</p>'
    beside = slower if samples and len(samples) < len(entry.executed) else ""
    return f"<h3>Memory held{note}</h3><figure>{svg}</figure>{beside}"


def _comparison(comparison: Comparison | None, plan: Plan) -> str:
    if comparison is None:
        return ""
    lines = []
    for group in Group:
        rows = comparison.of(group)
        if not rows:
            continue
        if group is not Group.TOTAL:
            lines.append(f'<tr class="group"><td class="l" colspan="6">{TITLES[group]}</td></tr>')
        style = ' class="total"' if group is Group.TOTAL else ""
        lines += [_tr((row_label(row, plan), *row_cells(row)), left=1, style=style) for row in rows]
    head = _tr(("", *comparison_headers(comparison)), cell="th", left=1)
    return f"<h3>Simulated against executed</h3><table>{head}{''.join(lines)}</table>"


def _stages(plan: Plan) -> str:
    lines = [_tr(stage_cells(plan, stage), left=5) for stage in plan.stages]
    return f"<table>{_tr(STAGE_HEADERS, cell='th', left=5)}{''.join(lines)}</table>"


def _tr(cells: Sequence[str], *, cell: str = "td", left: int = 0, style: str = "") -> str:
    """A table row whose first `left` cells are left-aligned."""
    parts = (
        f"<{cell}{' class=l' if index < left else ''}>{escape(text)}</{cell}>"
        for index, text in enumerate(cells)
    )
    return f"<tr{style}>{''.join(parts)}</tr>"


def _left_out(folder: Folder) -> str:
    if not folder.left_out:
        return ""
    items = "".join(f"<li>{escape(reason)}</li>" for reason in folder.left_out)
    return f'<details><summary>Files that are not shown</summary><ul class="plain">{items}</ul></details>'
