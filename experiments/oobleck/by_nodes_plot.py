"""Throughput by number of nodes as lines: published solid, ours dashed.

Run:     python -m experiments.oobleck.by_nodes_plot
"""

import json
from collections.abc import Mapping

from experiments.harness.drawing import PLOTS, save
from experiments.harness.figure import Grid, Line, Lines
from experiments.harness.record import RESULTS
from experiments.oobleck.spot import DRAWN
from experiments.oobleck.systems import MODELS, MOST_NODES, published_rates

COUNTS = tuple(range(MOST_NODES // 2, MOST_NODES + 1))


def drawing(ours: Mapping[str, float]) -> Grid:
    """One panel per model."""
    panels = [
        Lines(title=model, x="nodes", y="samples/s", y_limits=(0, None), lines=_lines(model, ours))
        for model in MODELS
    ]
    return Grid(rows=[panels], panel_inches=(3.4, 3.6))


def _lines(model: str, ours: Mapping[str, float]) -> list[Line]:
    lines = []
    for system, colour in DRAWN.items():
        published = published_rates(system, model)
        if not published:
            continue
        key = f"modelled/{model.replace(' ', '-')}/{system}"
        for kind, style, rates in (
            ("published", "-", [published[count] for count in COUNTS]),
            ("our simulator", "--", [ours[f"{key}/{count}"] for count in COUNTS]),
        ):
            lines.append(
                Line(x=COUNTS, y=rates, colour=colour, style=style, label=f"{system}, {kind}", width=1.3)
            )
    return lines


if __name__ == "__main__":
    kept = json.loads((RESULTS / "oobleck_by_nodes.json").read_text())
    save(drawing(kept["ours"]), PLOTS, "oobleck_by_nodes")
