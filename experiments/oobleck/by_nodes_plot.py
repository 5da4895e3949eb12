"""Throughput by number of nodes as lines: published solid, ours dashed.

Run:     python -m experiments.oobleck.by_nodes_plot
"""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from experiments.oobleck.spot import DRAWN
from experiments.oobleck.systems import MODELS, MOST_NODES, published_rates
from experiments.paper import RESULTS

COUNTS = tuple(range(MOST_NODES // 2, MOST_NODES + 1))


def draw(result: Path = RESULTS / "oobleck_by_nodes.json") -> Path:
    """One panel per model; ours from the file that `by_nodes` writes."""
    ours = json.loads(result.read_text())["ours"]
    figure, axes = plt.subplots(1, len(MODELS), figsize=(3.4 * len(MODELS), 3.6), layout="constrained")
    for panel, model in zip(axes, MODELS, strict=True):
        for system, color in DRAWN.items():
            published = published_rates(system, model)
            if not published:
                continue
            key = f"modelled/{model.replace(' ', '-')}/{system}"
            panel.plot(COUNTS, [published[count] for count in COUNTS], color=color)
            panel.plot(COUNTS, [ours[f"{key}/{count}"] for count in COUNTS], color=color, linestyle="--")
        panel.set_title(model)
        panel.set_xlabel("nodes")
        panel.set_xticks(range(COUNTS[0], COUNTS[-1] + 1, 5))
        panel.set_ylim(bottom=0)
    axes[0].set_ylabel("samples/s")
    systems = [Line2D([], [], color=color, label=system) for system, color in DRAWN.items()]
    kinds = [
        Line2D([], [], color="black", label="published"),
        Line2D([], [], color="black", linestyle="--", label="our simulator"),
    ]
    figure.legend(handles=[*systems, *kinds], loc="outside lower center", ncols=5)
    target = result.parent / "plots" / f"{result.stem}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=90, metadata={"Software": None})
    plt.close(figure)
    return target


if __name__ == "__main__":
    draw()
