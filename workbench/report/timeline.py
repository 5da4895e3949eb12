"""A trace as a picture: one row per group of ranks, idle time hatched, every span to hover over."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from workbench.plan.plan import Plan
from workbench.report.palette import NEUTRAL, module_hues, text_on, tone
from workbench.report.tables import milliseconds, rank_runs
from workbench.schedule.action import COMPUTE, Pass
from workbench.trace import Lane, Message, Span, Trace
from workbench.units import ms

MOST_ROWS = 48

WIDTH, LEFT, RIGHT = 1180, 112, 78  # pixels: whole picture, row names, idle shares
COMPUTE_HEIGHT, LANE_HEIGHT, GAP, AXIS_HEIGHT = 20, 4, 6, 22
LABEL_PIXELS = 5.6  # width of one character of a label
LEAST_PIXELS = 0.4  # narrower spans are drawn this wide


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """Ranks that hold the same stages; the picture shows the first of them."""

    rank: int
    ranks: tuple[int, ...]
    stages: tuple[int, ...]


def timeline_rows(plan: Plan) -> tuple[TimelineRow, ...]:
    """Ranks grouped by the stages they hold, in order of their first rank."""
    held: dict[int, tuple[int, ...]] = {}
    for stage in plan.stages:
        for rank in stage.flat_ranks:
            held[rank] = (*held.get(rank, ()), stage.id)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(held):
        groups.setdefault(held[rank], []).append(rank)
    return tuple(TimelineRow(rank=ranks[0], ranks=tuple(ranks), stages=s) for s, ranks in groups.items())


def timeline_svg(plan: Plan, trace: Trace, *, scale_s: float) -> str:
    """The trace as one inline SVG; `scale_s` is the time at the right edge.

    At most `MOST_ROWS` rows are drawn; the caller says so where there are more.

    Raises:
        ValueError: a scale shorter than the trace.
    """
    if scale_s < trace.iteration_s:
        raise ValueError(f"timeline: scale {scale_s} s is shorter than the trace, {trace.iteration_s} s")
    rows = timeline_rows(plan)[:MOST_ROWS]
    canvas = _Canvas(scale_s=scale_s or 1.0, hues=module_hues([m.name for m in plan.model.modules]))
    for row in rows:
        canvas.add_row(plan, trace, row)
    return canvas.svg()


def legend_html(plan: Plan) -> str:
    """Which colour is which module and pass."""
    parts = []
    kinds = sorted({action.kind for p in plan.programs for action in p.actions}, key=list(Pass).index)
    for module, hue in module_hues([m.name for m in plan.model.modules]).items():
        swatches = "".join(
            f'<i style="background:{tone(hue, kind)}" title="{kind.value}"></i>'
            for kind in kinds
            if kind in COMPUTE
        )
        parts.append(f"<span>{swatches}{escape(module)}</span>")
    letters = "/".join(kind.value for kind in kinds if kind in COMPUTE)
    parts.append(f'<span class="faint">shades: {letters}</span>')
    parts.append(f'<span><i style="background:{NEUTRAL}"></i>reduction, step, sending</span>')
    parts.append('<span><i class="idle"></i>idle</span>')
    return f'<div class="legend">{"".join(parts)}</div>'


def nice_step(span: float, most: int) -> float:
    """The smallest step of the form 1, 2 or 5 times a power of ten that gives at most `most` steps."""
    if span <= 0 or most < 1:
        raise ValueError(f"axis: want a span > 0 and >= 1 step, got {span} and {most}")
    power = 10.0 ** floor(log10(span / most))
    return next(step * power for step in (1, 2, 5, 10, 20) if span / (step * power) <= most)


class _Canvas:
    """Collects the elements of one picture from top to bottom."""

    def __init__(self, *, scale_s: float, hues: dict[str, str]) -> None:
        self._scale_s = scale_s
        self._hues = hues
        self._parts: list[str] = []
        self._y = 4.0

    def add_row(self, plan: Plan, trace: Trace, row: TimelineRow) -> None:
        mine = [span for span in trace.spans if span.rank == row.rank]
        compute = [span for span in mine if span.lane is Lane.COMPUTE]
        reduce = [span for span in mine if span.lane is Lane.REDUCE]
        sent = [message for message in trace.messages if message.source_rank == row.rank]
        self._names(row, _idle_fraction(compute, trace.iteration_s))
        end = self._x(trace.iteration_s)
        self._parts.append(
            f'<rect x="{LEFT}" y="{self._y:g}" width="{end - LEFT:.2f}" height="{COMPUTE_HEIGHT}" '
            'fill="url(#idle)"/>'
        )
        for span in compute:
            self._span(plan, span, self._y, COMPUTE_HEIGHT)
        self._y += COMPUTE_HEIGHT
        for span in reduce:
            self._span(plan, span, self._y + 1, LANE_HEIGHT)
        for message in sent:
            self._message(message, self._y + 1 + (LANE_HEIGHT + 1 if reduce else 0))
        self._y += (LANE_HEIGHT + 1) * (bool(reduce) + bool(sent)) + GAP

    def svg(self) -> str:
        axis = self._axis()
        height = self._y + AXIS_HEIGHT
        return (
            f'<svg class="timeline" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
            f'role="img">{axis}{"".join(self._parts)}</svg>'
        )

    def _x(self, time_s: float) -> float:
        return LEFT + time_s / self._scale_s * (WIDTH - LEFT - RIGHT)

    def _names(self, row: TimelineRow, idle: float) -> None:
        middle = self._y + COMPUTE_HEIGHT / 2 + 4
        name = f"rank{'s' if len(row.ranks) > 1 else ''} {rank_runs(row.ranks)}"
        self._parts.append(
            f'<text class="name" x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{name}</text>'
            f'<text class="share" x="{WIDTH - 4}" y="{middle:g}" text-anchor="end">{idle:.0%} idle</text>'
        )

    def _span(self, plan: Plan, span: Span, top: float, height: float) -> None:
        left = self._x(span.start_s)
        width = max(self._x(span.end_s) - left, LEAST_PIXELS)
        fill = self._fill(plan, span)
        label = str(span.action)
        self._parts.append(
            f'<rect class="s" x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height}" '
            f'fill="{fill}" data-t="{escape(_span_text(plan, span))}"/>'
        )
        if height == COMPUTE_HEIGHT and width >= LABEL_PIXELS * len(label) + 3:
            self._parts.append(
                f'<text class="label" x="{left + width / 2:.2f}" y="{top + height / 2 + 3.4:g}" '
                f'fill="{text_on(fill)}">{label}</text>'
            )

    def _message(self, message: Message, top: float) -> None:
        left = self._x(message.start_s)
        width = max(self._x(message.end_s) - left, LEAST_PIXELS)
        text = (
            f"row {message.row}, {message.edge}\nrank {message.source_rank} to "
            f"{message.destination_rank}, {message.num_bytes:,} bytes\nwaited "
            f"{milliseconds(message.start_s - message.ready_s)}, took "
            f"{milliseconds(message.end_s - message.start_s)}"
        )
        self._parts.append(
            f'<rect class="s" x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{LANE_HEIGHT}" '
            f'fill="{NEUTRAL}" opacity="0.55" data-t="{escape(text)}"/>'
        )

    def _fill(self, plan: Plan, span: Span) -> str:
        if span.action.kind not in COMPUTE or span.action.stage is None:
            return NEUTRAL
        return tone(self._hues[plan.stage[span.action.stage].module], span.action.kind)

    def _axis(self) -> str:
        step = nice_step(ms(self._scale_s), 10)
        parts = []
        for index in range(int(ms(self._scale_s) / step * (1 + 1e-12)) + 1):
            x = self._x(index * step / 1e3)
            label = f"{index * step:g}" + (" ms" if index == 0 else "")
            parts.append(
                f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{self._y:g}"/>'
                f'<text class="tick" x="{x:.2f}" y="{self._y + 14:g}" text-anchor="middle">{label}</text>'
            )
        return "".join(parts)


def _span_text(plan: Plan, span: Span) -> str:
    head = str(span.action)
    if span.action.stage is not None:
        stage = plan.stage[span.action.stage]
        head += f"  {stage.module} layers {stage.layers[0]}..{stage.layers[1] - 1}"
    return (
        f"{head}\n{milliseconds(span.start_s)} to {milliseconds(span.end_s)}\n"
        f"took {milliseconds(span.end_s - span.start_s)} on rank {span.rank}"
    )


def _idle_fraction(compute: Sequence[Span], iteration_s: float) -> float:
    busy_s = sum(span.end_s - span.start_s for span in compute)
    return 1 - busy_s / iteration_s if iteration_s > 0 else 0.0
