"""Data that the page's scripts read: plans with their rows, colours and traces."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.plan.plan import Plan
from workbench.report.compare import timed, watched
from workbench.report.critical import CriticalPath
from workbench.report.folder import Entry
from workbench.report.palette import module_hues, text_on, tone
from workbench.report.timeline import timeline_rows
from workbench.schedule.action import COMPUTE, MEANING, Pass
from workbench.trace import Trace, median_trace
from workbench.trace_json import LANE_IDS, dumps

ID_LETTERS = 12  # of a plan's hash


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTrace:
    """A trace in the page.

    Args:
        key: in links to the page.
        title: above its timeline; empty: only its memory is drawn.
    """

    key: str
    title: str
    trace: Trace


def plan_id(entry: Entry) -> str:
    """Id of a plan in links to the page and in the page itself."""
    return entry.plan_hash[:ID_LETTERS]


def traces_of(entry: Entry) -> tuple[PageTrace, ...]:
    """Simulated, executed, emulated, and the repetition with watched memory if that is another one."""
    traces = []
    if entry.simulated is not None:
        traces.append(PageTrace(key="simulated", title="Simulated", trace=entry.simulated))
    if entry.executed:
        times = timed(entry.executed)
        title = f"Executed, the run nearest the median of {len(times)}" if len(times) > 1 else "Executed"
        traces.append(PageTrace(key="executed", title=title, trace=median_trace(times)))
    if entry.emulated is not None:
        title = "Emulated: actions timed alone, one after the other, on one device"
        traces.append(PageTrace(key="emulated", title=title, trace=entry.emulated))
    if (samples := watched(entry.executed)) and not any(each.trace.memory for each in traces[1:2]):
        traces.append(PageTrace(key="watched", title="", trace=median_trace(samples)))
    return tuple(traces)


def plan_record(entry: Entry, paths: Mapping[str, CriticalPath]) -> dict[str, Any]:
    """A plan as the scripts need it; times and bytes are in the traces. `paths`: by the traces' keys."""
    plan = entry.plan
    names = [module.name for module in plan.model.modules]
    kinds = _kinds(plan)
    return {
        "id": plan_id(entry),
        "kinds": [kind.value for kind in kinds],
        "about": {kind.value: MEANING[kind].about for kind in kinds},
        "modules": names,
        "lanes": {number: lane.value for lane, number in LANE_IDS.items()},
        "rows": [{"ranks": row.ranks, "stages": row.stages} for row in timeline_rows(plan)],
        "stages": {
            stage.id: {"module": stage.module, "first": stage.layers[0], "last": stage.layers[1] - 1}
            for stage in plan.stages
        },
        "fills": fills(plan),
        "traces": [
            {
                "key": each.key,
                "title": each.title,
                "isDrawn": bool(each.title),
                "file": f"{entry.path.name.split('.')[0]}.{plan_id(entry)}.{each.key}.json",
                "critical": paths[each.key].as_json() if each.key in paths else None,
            }
            for each in traces_of(entry)
        ],
        "memory": [
            {"key": each.key, "shown": "executed" if each.key == "watched" else each.key}
            for each in traces_of(entry)
            if each.trace.memory
        ],
    }


def fills(plan: Plan) -> dict[str, dict[str, tuple[str, str]]]:
    """Module -> pass -> its colour, and that of text on it."""
    hues = module_hues([module.name for module in plan.model.modules])
    passes = [kind for kind in _kinds(plan) if kind in COMPUTE]
    fills_by_module = {name: {kind.value: tone(hue, kind) for kind in passes} for name, hue in hues.items()}
    return {
        name: {kind: (fill, text_on(fill)) for kind, fill in of_kind.items()}
        for name, of_kind in fills_by_module.items()
    }


def _kinds(plan: Plan) -> list[Pass]:
    """Kinds of actions in the plan's programs, in the order of `Pass`."""
    return sorted({action.kind for action in plan.program_actions}, key=list(Pass).index)


def packed_trace(trace: Trace) -> str:
    """The trace's file, compressed, as text that is safe in HTML. Equal traces give equal text."""
    return base64.b64encode(gzip.compress(dumps(trace).encode(), mtime=0)).decode()


def data_elements(record: dict[str, Any], entries: Sequence[Entry]) -> str:
    """The elements of the page that hold the record and the traces."""
    text = json.dumps(record, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = [f'<script type="application/json" id="data">{text}</script>']
    parts += [
        f'<script type="text/plain" id="trace-{plan_id(entry)}-{each.key}">'
        f"{packed_trace(each.trace)}</script>"
        for entry in entries
        for each in traces_of(entry)
    ]
    return "\n".join(parts)
