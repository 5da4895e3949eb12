"""A trace as a static picture: one row per group of ranks, idle time hatched."""

from collections.abc import Sequence

from workbench.plan.plan import Plan
from workbench.report.palette import NEUTRAL, module_hues, text_on, tone
from workbench.report.tables import rank_runs
from workbench.report.timeline import TimelineRow, nice_step, timeline_rows
from workbench.schedule.action import COMPUTE
from workbench.trace import Lane, Message, Span, Trace
from workbench.units import ms

MOST_ROWS = 48

WIDTH, LEFT, RIGHT = 1180, 112, 78  # pixels: whole picture, row names, idle shares
COMPUTE_HEIGHT, LANE_HEIGHT, GAP, AXIS_HEIGHT = 20, 4, 6, 22
LABEL_PIXELS = 5.6  # width of one character of a label
LEAST_PIXELS = 0.4  # narrower spans are drawn this wide


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
            f'fill="{fill}"/>'
        )
        if height == COMPUTE_HEIGHT and width >= LABEL_PIXELS * len(label) + 3:
            self._parts.append(
                f'<text class="label" x="{left + width / 2:.2f}" y="{top + height / 2 + 3.4:g}" '
                f'fill="{text_on(fill)}">{label}</text>'
            )

    def _message(self, message: Message, top: float) -> None:
        left = self._x(message.start_s)
        width = max(self._x(message.end_s) - left, LEAST_PIXELS)
        self._parts.append(
            f'<rect class="s" x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{LANE_HEIGHT}" '
            f'fill="{NEUTRAL}" opacity="0.55"/>'
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


def _idle_fraction(compute: Sequence[Span], iteration_s: float) -> float:
    busy_s = sum(span.end_s - span.start_s for span in compute)
    return 1 - busy_s / iteration_s if iteration_s > 0 else 0.0
