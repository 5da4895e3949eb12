"""Plot an elastic training over wall time from its record: nodes, samples per second, loss."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from workbench.report.palette import EXECUTED, HUES, INK, LIGHT, NEUTRAL, PLOT_STYLE, SIMULATED

CAUSE_COLOURS = {"start": NEUTRAL, "loss": EXECUTED, "warning": HUES[1], "join": HUES[2]}

Record = Mapping[str, Any]


def draw_elastic(record: Record, path: Path) -> None:
    """Draw a PNG of three panels over one clock; bands mark changes, from first sign until ready.

    Args:
        record: as `elastic` writes it, with at least one step.
    """
    with rc_context(PLOT_STYLE):
        figure = Figure(figsize=(9.0, 6.4), layout="constrained")
        nodes, rate, loss = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.2, 1.2))
        _draw_nodes(nodes, record)
        _draw_rate(rate, record)
        _draw_loss(loss, record)
        for axes in (nodes, rate, loss):
            for change in record["changes"]:
                colour = CAUSE_COLOURS[change["cause"]]
                axes.axvspan(change["noticed_s"], change["ready_s"], color=colour, alpha=0.3, linewidth=0)
            axes.grid(visible=True, axis="y", linewidth=0.5, color=LIGHT["line"])
            axes.set_axisbelow(True)
        loss.set_xlabel("seconds since the start")
        causes = dict.fromkeys(change["cause"] for change in record["changes"])
        handles = [
            nodes.fill_between([], [], color=CAUSE_COLOURS[cause], alpha=0.3, label=cause) for cause in causes
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        figure.suptitle(f"{record['job']}: {len(record['steps'])} steps", x=0.01, ha="left", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


def _draw_nodes(axes: Axes, record: Record) -> None:
    changes: Sequence[Record] = record["changes"]
    end_s = record["steps"][-1]["end_s"]
    starts = [change["ready_s"] for change in changes]
    counts = [sum(change["pipelines"]) for change in changes]
    axes.step([*starts, end_s], [*counts, counts[-1]], where="post", color=INK)
    for change, count in zip(changes, counts, strict=True):
        names = [f"-{node}" for node in change["lost"]]
        if change["cause"] != "start":
            names += [f"+{node}" for node in change["joined"]]
        if names:
            where = (change["ready_s"], count)
            axes.annotate(" ".join(names), where, xytext=(3, 4), textcoords="offset points", fontsize=7)
    axes.axhline(record["threshold"], color=NEUTRAL, linewidth=0.8, linestyle=":")
    axes.annotate(
        "least", (end_s, record["threshold"]), xytext=(-4, 3), textcoords="offset points", ha="right"
    )
    axes.set(ylabel="nodes", ylim=(0, max(counts) + 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_rate(axes: Axes, record: Record) -> None:
    timed = [step for step in record["steps"] if step["samples_per_s"] is not None]
    axes.plot(
        [step["end_s"] for step in timed],
        [step["samples_per_s"] for step in timed],
        "o",
        markersize=3.5,
        color=EXECUTED,
        label="measured",
    )
    predicted = {tuple(layout["pipelines"]): layout["predicted_s"] for layout in record["layouts"]}
    label = "predicted"
    for first_s, last_s, pipelines in _layout_intervals(record["steps"]):
        seconds = predicted[pipelines]
        if seconds is not None:
            axes.hlines(record["samples"] / seconds, first_s, last_s, color=SIMULATED, label=label)
            label = ""  # one line in the legend
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", ncols=2)


def _layout_intervals(steps: Sequence[Record]) -> list[tuple[float, float, tuple[int, ...]]]:
    """(end of its first step, end of its last one, pipelines) of consecutive steps with one layout."""
    intervals: list[tuple[float, float, tuple[int, ...]]] = []
    for step in steps:
        pipelines = tuple(step["pipelines"])
        if intervals and intervals[-1][2] == pipelines:
            intervals[-1] = (intervals[-1][0], step["end_s"], pipelines)
        else:
            intervals.append((step["end_s"], step["end_s"], pipelines))
    return intervals


def _draw_loss(axes: Axes, record: Record) -> None:
    steps = record["steps"]
    axes.plot([s["end_s"] for s in steps], [s["loss"] for s in steps], "-o", markersize=3, color=HUES[3])
    axes.set_ylabel("loss")
