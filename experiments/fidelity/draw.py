"""Drawing of `results/fidelity.json`: predicted against executed, and errors by kind of action."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.figure import BLUE, GREEN, ORANGE, PINK, RED, Band, Grid, Line, Lines
from experiments.harness.record import RESULTS

RESULT = RESULTS / "fidelity.json"
COLOURS = {"clean": BLUE, "context": GREEN, "divided": ORANGE, "crowded": RED, "emulated": PINK}
BAND = 0.03


def drawing(result: Mapping[str, Any]) -> Grid:
    """Grid of two panels: seconds of every plan, and their errors."""
    title = (
        f"{result['num_plans']} plans; of the {result['pinned']['num_plans']} with a core to a rank that "
        "divide no weights: mean "
        f"absolute error {result['mean_abs_error']:.1%}, worst {result['worst_abs_error']:.1%}, "
        f"beside a spread of {result['spread']:.1%}"
    )
    rows = [[_iterations(result["plans"]), _kinds(result["plans"])]]
    return Grid(rows=rows, title=title, panel_inches=(7.0, 6.0))


def _iterations(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """Bars from the fastest to the slowest step; the band is +-3 %."""
    ends = [row[name] for row in rows for name in ("predicted_s", "executed_s")]
    limits = (min(ends) / 1.2, max(ends) * 1.2)
    low, high = ([end * (1 + shift) for end in limits] for shift in (-BAND, BAND))
    return Lines(
        title="iteration time; bars: fastest to slowest step",
        x="predicted, s",
        y="executed, s",
        log="xy",
        x_limits=limits,
        y_limits=limits,
        lines=[_times(part, [row for row in rows if row["part"] == part]) for part in COLOURS],
        bands=[Band(x=limits, low=low, high=high, label=f"+-{BAND:.0%}")],
    )


def _times(part: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    down = [row["executed_s"] - row["lowest_s"] for row in rows]
    up = [row["highest_s"] - row["executed_s"] for row in rows]
    return Line(
        x=[row["predicted_s"] for row in rows],
        y=[row["executed_s"] for row in rows],
        errors=(down, up),
        colour=COLOURS[part],
        style="",
        marker="o",
        label=part if rows else "",
    )


def _kinds(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """Panel with one point per plan and kind of action, besides the iteration."""
    kinds = ["iteration", *dict.fromkeys(kind for row in rows for kind in row["kinds"])]
    lines = [
        _errors(index, kind, part, [row for row in rows if row["part"] == part])
        for index, kind in enumerate(kinds)
        for part in COLOURS
    ]
    across = (-0.5, len(kinds) - 0.5)
    band = Band(x=across, low=(-100 * BAND,) * 2, high=(100 * BAND,) * 2)
    return Lines(
        title="error of every plan by kind of action (seconds of all ranks)",
        y="predicted / executed - 1, %",
        level=0,
        slant=20,
        names=kinds,
        lines=lines,
        bands=[band],
    )


def _errors(position: int, kind: str, part: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    cells = [row if kind == "iteration" else row["kinds"].get(kind) for row in rows]
    errors = [100 * cell["error"] for cell in cells if cell is not None]
    offsets = [position + 0.5 * (index + 0.5) / len(errors) - 0.25 for index in range(len(errors))]
    return Line(x=offsets, y=errors, colour=COLOURS[part], style="", marker=".")
