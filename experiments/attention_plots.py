"""Plots of `experiments.bench.attention`: busiest rank by policy, launches against the optimum, activity."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = Mapping[str, Any]

POLICIES = {
    "longest_first_exchanged": ("longest first, exchanged (plans)", "#1b7837"),
    "longest_first": ("longest first", "#7fbf7b"),
    "longest_first_equal_counts": ("longest first, equal counts", "#2166ac"),
    "sorted_round_robin": ("sorted round robin", "#92c5de"),
    "random_blocks": ("random", "#bbbbbb"),
    "zigzag": ("zigzag", "#f4a582"),
    "contiguous": ("contiguous", "#b2182b"),
}
KERNELS = {
    "static": ("static order", "#b2182b"),
    "longest_first": ("longest first", "#92c5de"),
    "where_it_pays": ("longest first, rows cut where it pays", "#1b7837"),
}
PANELS = {
    "causal_cp": "causal CP",
    "inter_gpu_only": "balanced across GPUs",
    "intra_gpu_only": "balanced inside GPUs",
    "cornstarch": "both",
}


def draw_attention(record: Record, folder: Path) -> tuple[Path, ...]:
    """Three PNGs."""
    folder.mkdir(parents=True, exist_ok=True)
    return (
        _saved(_evenness(record["max_over_mean"]), folder / "attention_evenness.png"),
        _saved(_launches(record["simulated"]), folder / "attention_launches.png"),
        _saved(_activity(record["activity"]), folder / "attention_activity.png"),
    )


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _evenness(by_mask: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """A panel per mask, a group of bars per length, what is above 1 on a logarithmic scale."""
    figure: Figure
    figure, panels = plt.subplots(1, len(by_mask), figsize=(14, 4.8), sharey=True, layout="constrained")
    for axes, (mask, lengths) in zip(panels, by_mask.items(), strict=True):
        groups = [
            (label, [max(of[policy] - 1, 1e-5) for of in lengths.values()], color)
            for policy, (label, color) in POLICIES.items()
        ]
        _grouped(axes, groups, list(lengths))
        axes.set(title=mask, yscale="log")
        axes.axhline(0.01, color="black", linewidth=0.8, linestyle="--")
    panels[0].set_ylabel("busiest rank over the mean, less 1 (dashed: the goal)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("Attention work on 8 context-parallel ranks, by policy")
    return figure


def _launches(cells: Sequence[Record]) -> Figure:
    """A panel per length and launch, a group of bars per mask."""
    lengths = list(dict.fromkeys(cell["length"] for cell in cells))
    launches = list(dict.fromkeys(cell["launch"] for cell in cells))
    masks = list(dict.fromkeys(cell["mask"] for cell in cells))
    figure: Figure
    figure, panels = plt.subplots(
        len(lengths), len(launches), figsize=(14, 7), squeeze=False, layout="constrained"
    )
    value = {
        (c["mask"], c["length"], c["launch"], c["kernel"]): (c["over_optimum"], c["seconds"]) for c in cells
    }
    for row, length in zip(panels, lengths, strict=True):
        for axes, launch in zip(row, launches, strict=True):
            groups = [
                (label, [1e6 * value[mask, length, launch, kernel][1] for mask in masks], color)
                for kernel, (label, color) in KERNELS.items()
            ]
            _grouped(axes, groups, masks)
            axes.set_title(f"{length}, {launch}", fontsize=10)
            axes.set_ylabel("simulated forward, microseconds", fontsize=8)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("One launch on an H200, simulated: order and cuts of the kernel")
    return figure


def _activity(policies: Mapping[str, Record]) -> Figure:
    """A panel per policy, a line per GPU, one time axis."""
    figure: Figure
    figure, panels = plt.subplots(2, 2, figsize=(14, 7), sharex=True, sharey=True, layout="constrained")
    for axes, (policy, title) in zip(panels.flat, PANELS.items(), strict=True):
        found = policies[policy]
        for share in found["share"]:
            places = [1e3 * found["seconds"] * (bin_ + 0.5) / len(share) for bin_ in range(len(share))]
            axes.plot(places, share, linewidth=0.8)
        axes.set(title=f"{title}: {1e3 * found['seconds']:.1f} ms", ylim=(0, 1.05))
    figure.supxlabel("milliseconds")
    figure.supylabel("busy compute units")
    figure.suptitle("Compute units over one attention layer, 8 GPUs, 64k tokens, EE mask (ICML Figure 6)")
    return figure


def _grouped(axes: Axes, groups: Sequence[tuple[str, Sequence[float], str]], names: Sequence[str]) -> None:
    width = 0.8 / len(groups)
    for index, (label, values, color) in enumerate(groups):
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(names))]
        axes.bar(places, values, width, label=label, color=color)
    axes.set_xticks(range(len(names)), names)
