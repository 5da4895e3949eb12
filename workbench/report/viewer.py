"""A plan's timelines and memory as elements that the page's scripts fill: toolbar, filters, pictures."""

from html import escape

from workbench.report.folder import Entry
from workbench.report.page_data import PageTrace, fills, traces_of
from workbench.schedule.action import COMPUTE, MEANING, Pass

KEYS = (
    ("Ctrl", "wheel, pinch, or the wheel alone after a click: zoom"),
    ("+ - 0", "zoom, all"),
    ("← →", "pan"),
    ("Shift", "with arrows: from span to span"),
    ("Enter", "zoom to the span"),
    ("Esc", "let go"),
)
TOUCHES = "Two fingers: zoom. Drag: pan. Tap: choose a span. Double tap: zoom to it."


def viewer_html(entry: Entry) -> str:
    """Timelines over one clock with their filters, then memory; a sentence if there is no trace."""
    traces = traces_of(entry)
    drawn = [each for each in traces if each.title]
    if not drawn:
        return "<p>Not simulated and not executed.</p>"
    strips = "".join(map(_strip, drawn))
    return (
        f"<h3>Timelines, one scale</h3>{_toolbar()}{_legend(entry)}{strips}"
        f'<p class="handed faint" role="status"></p><pre class="selected" aria-live="polite"></pre>'
        f'<p class="faint">Thin lanes below a rank: exchanges and reductions, then messages it sends. '
        f'<span class="several">A row of several ranks shows the first of them.</span></p>'
        f'<p class="faint keys">{_keys()}</p><p class="faint touches">{TOUCHES}</p>{_memory(traces)}'
    )


def _toolbar() -> str:
    return (
        '<div class="toolbar" role="toolbar" aria-label="Timelines">'
        '<button type="button" class="zoom-in" aria-label="zoom in">+</button>'
        '<button type="button" class="zoom-out" aria-label="zoom out">&minus;</button>'
        '<button type="button" class="fit">All</button>'
        '<button type="button" class="path" aria-pressed="false">Critical path</button>'
        '<label class="faint">ranks <input type="text" class="ranks" placeholder="all, or 0-3, 8" '
        'aria-label="ranks that are shown" autocomplete="off"></label>'
        '<label class="faint"><input type="checkbox" class="each"> a row for every rank</label>'
        '<span class="gap"></span><output class="window"></output><output class="shown faint"></output></div>'
    )


def _legend(entry: Entry) -> str:
    """Colours of modules and passes, each a filter."""
    colours = fills(entry.plan)
    modules = "".join(
        f'<label><input type="checkbox" data-module="{escape(name)}" checked>'
        + "".join(f'<i style="background:{fill}" title="{kind}"></i>' for kind, (fill, _) in of_kind.items())
        + f"{escape(name)}</label>"
        for name, of_kind in colours.items()
    )
    kinds = sorted({action.kind for action in entry.plan.program_actions}, key=list(Pass).index)
    boxes = "".join(
        f'<label title="{escape(MEANING[kind].about)}">'
        f'<input type="checkbox" data-kind="{kind.value}" checked>'
        + ("" if kind in COMPUTE else '<i style="background:var(--neutral)"></i>')
        + f"{kind.value}</label>"
        for kind in kinds
    )
    return (
        f'<div class="legend"><fieldset><legend>modules</legend>{modules}</fieldset>'
        f"<fieldset><legend>kinds</legend>{boxes}</fieldset></div>"
    )


def _strip(each: PageTrace) -> str:
    return (
        f'<div class="strip"><header><b>{escape(each.title)}</b>'
        f'<button type="button" class="quiet" data-perfetto="{each.key}">Open in Perfetto</button>'
        f'<button type="button" class="quiet" data-download="{each.key}">Download trace</button></header>'
        f'<div data-timeline="{each.key}"></div></div>'
    )


def _keys() -> str:
    return " &ensp; ".join(f"<kbd>{key}</kbd> {escape(text)}" for key, text in KEYS)


def _memory(traces: tuple[PageTrace, ...]) -> str:
    with_memory = [each for each in traces if each.trace.memory]
    if not with_memory:
        return ""
    names = dict.fromkeys("executed" if each.key == "watched" else each.key for each in with_memory)
    key = "".join(f'<span><i style="background:var(--{name})"></i>{name}</span>' for name in names)
    key += '<span class="faint">on the right, the peak of each rank</span>'
    return f'<h3>Memory held</h3><p class="key">{key}</p><div data-memory></div>'
