"""Timelines drawn as boxes: a row for every block of ranks, a colour for every module and direction."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

COLORS = {
    ("vision", True): "#74c476",
    ("vision", False): "#238b45",
    ("llm", True): "#fdae6b",
    ("llm", False): "#d94801",
}


class Box(NamedTuple):
    """One pass on a row of the drawing."""

    row: int
    module: str
    is_forward: bool
    start: float
    end: float


def draw(panels: Mapping[str, Sequence[Box]], unit: str, path: Path) -> Path:
    """One panel under the other over one scale."""
    last = max(box.end for boxes in panels.values() for box in boxes)
    rows = [1 + max(box.row for box in boxes) for boxes in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(14, 0.9 + 0.22 * sum(rows) + 0.5 * len(rows)),
        height_ratios=rows,
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for panel, (name, boxes) in zip(axes[:, 0], panels.items(), strict=True):
        for (module, is_forward), color in COLORS.items():
            mine = [box for box in boxes if (box.module, box.is_forward) == (module, is_forward)]
            panel.barh(
                [box.row for box in mine],
                [box.end - box.start for box in mine],
                left=[box.start for box in mine],
                color=color,
                edgecolor="white",
                linewidth=0.3,
                label=f"{module} {'forward' if is_forward else 'backward'}",
            )
        panel.set(xlim=(0, last), ylabel="block")
        panel.invert_yaxis()
        ends = max(box.end for box in boxes)
        panel.set_title(f"{name}: {ends:.4g} {unit}", fontsize=9, loc="left")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, fontsize=7, loc="outside upper right")
    axes[-1][0].set_xlabel(unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path
