"""Plots of `experiments.bench.attention`: busiest rank by policy, launches against the optimum, activity."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.figure import (
    BLUE,
    GREEN,
    LIGHT,
    ORANGE,
    PINK,
    RED,
    SKY,
    Bars,
    Grid,
    Line,
    Lines,
    Series,
    wrapped,
)
from workbench.report.palette import INK, mixed

Record = Mapping[str, Any]

POLICIES = {
    "longest_first_exchanged": ("longest first, exchanged (plans)", GREEN),
    "longest_first": ("longest first", PINK),
    "longest_first_equal_counts": ("longest first, equal counts", BLUE),
    "sorted_round_robin": ("sorted round robin", SKY),
    "random_blocks": ("random", LIGHT),
    "zigzag": ("zigzag", ORANGE),
    "contiguous": ("contiguous", RED),
}
KERNELS = {
    "static": ("static order", RED),
    "longest_first": ("longest first", SKY),
    "where_it_pays": ("longest first, rows cut where it pays", GREEN),
}
PANELS = {
    "causal_cp": "causal CP",
    "inter_gpu_only": "balanced across GPUs",
    "intra_gpu_only": "balanced inside GPUs",
    "cornstarch": "both",
}


def attention_figures(record: Record) -> dict[str, Grid]:
    """Draw the three figures; returns them by name."""
    return {
        "attention_evenness": _evenness(record["max_over_mean"]),
        "attention_launches": _launches(record["simulated"]),
        "attention_activity": _activity(record["activity"]),
    }


def _evenness(by_mask: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Grid:
    """Draw the imbalance above 1 on a logarithmic scale: a panel per mask, a group of bars per length."""
    panels = [
        Bars(
            title=mask,
            y="busiest rank over the mean, less 1",
            log="y",
            level=0.01,
            names=list(lengths),
            series=[
                Series(
                    values=[max(by_policy[policy] - 1, 1e-5) for by_policy in lengths.values()],
                    colour=colour,
                    label=label,
                )
                for policy, (label, colour) in POLICIES.items()
            ],
        )
        for mask, lengths in by_mask.items()
    ]
    title = "Attention work on 8 context-parallel ranks, by policy (dashed: the goal)"
    return Grid(rows=[panels], title=title, panel_inches=(14 / len(panels), 4.8), shares_y="all")


def _launches(cells: Sequence[Record]) -> Grid:
    """Draw the launches: a panel per length and launch, a group of bars per mask."""
    lengths, launches, masks = (
        list(dict.fromkeys(cell[name] for cell in cells)) for name in ("length", "launch", "mask")
    )
    seconds = {(c["mask"], c["length"], c["launch"], c["kernel"]): c["seconds"] for c in cells}
    rows = [
        [
            Bars(
                title=f"{length}, {launch}",
                y="simulated forward, microseconds",
                names=masks,
                series=[
                    Series(
                        values=[1e6 * seconds[mask, length, launch, kernel] for mask in masks],
                        colour=colour,
                        label=label,
                    )
                    for kernel, (label, colour) in KERNELS.items()
                ],
            )
            for launch in launches
        ]
        for length in lengths
    ]
    title = "One launch on an H200, simulated: order and cuts of the kernel"
    return Grid(rows=rows, title=title, panel_inches=(14 / len(launches), 7 / len(lengths)))


def _activity(policies: Mapping[str, Record]) -> Grid:
    """Draw the activity over one time axis: a panel per policy, a line per GPU."""
    panels = []
    for policy, title in PANELS.items():
        activity = policies[policy]
        lines = [
            Line(
                x=[1e3 * activity["seconds"] * (index + 0.5) / len(share) for index in range(len(share))],
                y=share,
                colour=mixed(SKY, INK, 1 - gpu / len(activity["share"])),
                label=f"GPU {gpu}",
                width=0.8,
            )
            for gpu, share in enumerate(activity["share"])
        ]
        panels.append(
            Lines(
                title=f"{title}: {1e3 * activity['seconds']:.1f} ms",
                x="milliseconds",
                y="share of busy compute units",
                y_limits=(0, 1.05),
                lines=lines,
            )
        )
    title = "Compute units over one attention layer, 8 GPUs, 64k tokens, EE mask (ICML Figure 6)"
    return Grid(rows=wrapped(panels, 2), title=title, panel_inches=(7.0, 3.5), shares_x="all", shares_y="all")
