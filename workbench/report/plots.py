"""Plots of a report, as inline SVG: predicted against executed, iteration times, memory over time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from math import ceil
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from workbench.report.palette import EXECUTED, INK, SIMULATED
from workbench.report.tables import milliseconds
from workbench.report.timeline import TimelineRow
from workbench.trace import Trace
from workbench.units import MIB, ms

MOST_MEMORY_PLOTS = 12
TOLERANCE = 0.10  # the band drawn around the diagonal

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9AA5B1",
    "axes.labelcolor": INK,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "xtick.color": "#52606D",
    "ytick.color": "#52606D",
    "grid.color": "#E4E7EB",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """Iteration times of one plan. `executed_s` is empty where it was only simulated."""

    label: str
    simulated_s: float | None
    executed_s: tuple[float, ...] = ()

    @property
    def executed_median_s(self) -> float | None:
        return median(self.executed_s) if self.executed_s else None


def accuracy_svg(plans: Sequence[PlanTimes]) -> str:
    """Predicted over executed iteration time; bars span the repetitions, the band is +-10 %.

    Points carry the plan's number in the order given, as in `ranking_svg`.
    """
    pairs = [
        (number, plan, plan.simulated_s, plan.executed_median_s)
        for number, plan in enumerate(plans, 1)
        if plan.simulated_s is not None and plan.executed_median_s is not None
    ]
    if not pairs:
        raise ValueError("accuracy plot: want at least one plan both simulated and executed, got none")
    with _figure(4.6, 4.0) as (figure, out):
        axes = figure.subplots()
        most = 1.12 * max(ms(value) for _, _, simulated, executed in pairs for value in (simulated, executed))
        axes.fill_between(
            [0, most],
            [0, most * (1 - TOLERANCE)],
            [0, most * (1 + TOLERANCE)],
            color=SIMULATED,
            alpha=0.08,
            linewidth=0,
            label=f"within {TOLERANCE:.0%}",
        )
        axes.plot([0, most], [0, most], color="#9AA5B1", linewidth=0.8)
        for number, plan, simulated, executed in pairs:
            below, above = executed - min(plan.executed_s), max(plan.executed_s) - executed
            axes.errorbar(
                ms(executed),
                ms(simulated),
                xerr=[[ms(below)], [ms(above)]],
                fmt="o",
                markersize=5,
                color=EXECUTED,
                ecolor=INK,
                elinewidth=0.9,
                capsize=2,
            )
            axes.annotate(
                str(number), (ms(executed), ms(simulated)), xytext=(6, -10), textcoords="offset points"
            )
        axes.set(xlim=(0, most), ylim=(0, most), xlabel="executed, ms (median and range)")
        axes.set_ylabel("predicted, ms")
        axes.set_aspect("equal")
        axes.grid(visible=True, linewidth=0.6)
        axes.legend(loc="upper left")
    return out[0]


def ranking_svg(plans: Sequence[PlanTimes]) -> str:
    """Iteration time of every plan, simulated beside executed, in the order given."""
    has_both = any(plan.executed_s for plan in plans) and any(plan.simulated_s is not None for plan in plans)
    aside = 0.19 if has_both else 0.0
    with _figure(7.0, 0.9 + (0.52 if has_both else 0.36) * len(plans)) as (figure, out):
        axes = figure.subplots()
        for index, plan in enumerate(plans):
            if plan.simulated_s is not None:
                _bar(axes, index - aside, (plan.simulated_s,), SIMULATED)
            if plan.executed_s:
                _bar(axes, index + aside, plan.executed_s, EXECUTED)
        if any(plan.simulated_s is not None for plan in plans):
            axes.plot([], [], color=SIMULATED, linewidth=6, label="simulated")
        if any(plan.executed_s for plan in plans):
            axes.plot([], [], color=EXECUTED, linewidth=6, label="executed, with range")
        axes.set_yticks(range(len(plans)), [f"{i}  {plan.label}" for i, plan in enumerate(plans, 1)])
        axes.invert_yaxis()
        axes.set_xlabel("iteration, ms")
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.grid(visible=True, axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return out[0]


def _bar(axes: Any, height: float, values_s: Sequence[float], colour: str) -> None:
    """A bar to the median, a line over the range, the median in figures behind both."""
    middle_s = median(values_s)
    axes.barh(height, ms(middle_s), height=0.34, color=colour)
    if len(values_s) > 1:
        axes.plot([ms(min(values_s)), ms(max(values_s))], [height] * 2, color=INK, linewidth=1.1)
    text = milliseconds(middle_s).removesuffix(" ms")
    place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
    axes.annotate(text, (ms(max(values_s)), height), **place)


def memory_svg(rows: Sequence[TimelineRow], simulated: Trace | None, executed: Trace | None) -> str:
    """Bytes held over time, one small plot per row; at most `MOST_MEMORY_PLOTS` rows.

    Raises:
        ValueError: no trace with memory samples of these ranks.
    """
    traces = [(t, c) for t, c in ((simulated, SIMULATED), (executed, EXECUTED)) if t is not None and t.memory]
    shown = [
        row for row in rows if any(sample.rank == row.rank for trace, _ in traces for sample in trace.memory)
    ][:MOST_MEMORY_PLOTS]
    if not shown:
        raise ValueError("memory plot: no trace has memory samples of the plan's ranks")
    columns = min(3, len(shown))
    lines = ceil(len(shown) / columns)
    end_ms = max(ms(trace.iteration_s) for trace, _ in traces)
    with _figure(3.9 * columns, 0.5 + 1.7 * lines) as (figure, out):
        grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axes, row in zip(grid.flat, shown, strict=False):
            for trace, colour in traces:
                _memory_line(axes, trace, row.rank, colour)
            axes.set_title(f"rank {row.rank}", pad=3)
            axes.set_xlim(0, end_ms)
            axes.grid(visible=True, linewidth=0.6)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        grid.flat[0].set_ylim(bottom=0)
        for axes in grid[:, 0]:
            axes.set_ylabel("MiB")
        for axes in grid[-1, :]:
            axes.set_xlabel("ms")
        names = ["simulated" if trace is simulated else "executed" for trace, _ in traces]
        handles = [
            grid.flat[0].plot([], [], color=colour, label=name)[0]
            for (_, colour), name in zip(traces, names, strict=True)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return out[0]


def _memory_line(axes: Any, trace: Trace, rank: int, colour: str) -> None:
    samples = [sample for sample in trace.memory if sample.rank == rank]
    if not samples:
        return
    times = [ms(sample.time_s) for sample in samples] + [ms(trace.iteration_s)]
    held = [sample.num_bytes / MIB for sample in samples]
    axes.step(times, [*held, held[-1]], where="post", color=colour, linewidth=1.1)


@contextmanager
def _figure(width_inches: float, height_inches: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw on; its SVG stands in the list after the block."""
    out: list[str] = []
    with rc_context(_STYLE):
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        yield figure, out
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    out.append(_inline(text.getvalue()))


def _inline(document: str) -> str:
    """The svg element without the XML prologue."""
    return document[document.index("<svg") :].strip()
