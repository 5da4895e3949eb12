"""Draws memory, descriptors and threads of every process over steps or requests."""

from collections.abc import Mapping

from experiments.harness.figure import Grid, Line, Lines
from experiments.soak.sampling import Series
from workbench.report.palette import module_hues
from workbench.units import MIB

UNITS = {"run": "steps", "elastic": "steps", "preprocess": "requests"}
DRAWN = {"uss_bytes": ("private memory (USS), MiB", MIB), "rss_bytes": ("resident memory (RSS), MiB", MIB)}
COUNTS = {"descriptors": ("open descriptors", 1), "threads": ("threads", 1)}


def drawing(series: Mapping[str, Series]) -> Grid:
    """One row per measure, one column per load."""
    rows = [
        [_panel(load, load_series, measure, text, unit) for load, load_series in series.items()]
        for measure, (text, unit) in (DRAWN | COUNTS).items()
    ]
    return Grid(rows=rows, title="What processes hold in long runs", panel_inches=(4.2, 2.4))


def _panel(load: str, load_series: Series, measure: str, text: str, unit: int) -> Lines:
    hues = module_hues(tuple(load_series.by_process))
    return Lines(
        title=load,
        x=UNITS[load],
        y=text,
        y_limits=(0, None),
        lines=[
            Line(
                x=load_series.done,
                y=[value / unit for value in load_series.values(process, measure)],
                colour=hues[process],
                label=process,
            )
            for process in load_series.by_process
        ],
    )
