"""Bars of figures whose values a paper prints only as a picture: what ours are, out of the result files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = Mapping[str, Any]

METHODS = {
    "encoders_replicated": ("encoders replicated", "#bbbbbb"),
    "encoders_colocated": ("encoders colocated", "#92c5de"),
    "fsdp": ("FSDP", "#bbbbbb"),
    "megatron": ("Megatron*", "#92c5de"),
    "cornstarch": ("Cornstarch", "#1b7837"),
}
WIDTH = 0.27


def has_throughputs(record: Record) -> bool:
    """Whether the result is of a figure of throughputs by method."""
    return any(key.endswith("/tput_low") for key in record["ours"])


def draw_throughputs(record: Record, folder: Path) -> Path:
    """A panel per LLM, a group of bars per model, a bar per method with its range. One PNG."""
    ours = record["ours"]
    models = dict.fromkeys(tuple(key.split("/")[1:3]) for key in ours if key.endswith("/tput"))
    llms = list(dict.fromkeys(llm for llm, _ in models))
    figure: Figure
    figure, panels = plt.subplots(
        1, len(llms), figsize=(4 + 5 * len(llms), 4.6), squeeze=False, layout="constrained"
    )
    for axes, llm in zip(panels[0], llms, strict=True):
        _throughputs(axes, ours, llm, [model for own, model in models if own == llm])
    panels[0][0].set_ylabel("inputs / s / GPU, simulated")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"{record['script']}: range over what is not stated")
    return _saved(figure, record, folder)


def _throughputs(axes: Axes, ours: Mapping[str, float], llm: str, models: Sequence[str]) -> None:
    drawn = [method for method in METHODS if any(f"/{method}/tput" in key for key in ours)]
    for place, (label, color) in enumerate(METHODS[method] for method in drawn):
        method = drawn[place]
        keys = [f"modelled/{llm}/{model}/{method}/tput" for model in models]
        heights = [ours[key] for key in keys]
        errors = (
            [height - ours[f"{key}_low"] for key, height in zip(keys, heights, strict=True)],
            [ours[f"{key}_high"] - height for key, height in zip(keys, heights, strict=True)],
        )
        axes.bar(
            [number + (place - 1) * WIDTH for number in range(len(models))],
            heights,
            WIDTH,
            yerr=errors,
            color=color,
            ecolor="#444444",
            capsize=2,
            label=label,
        )
    axes.set_xticks(range(len(models)), models, rotation=45, ha="right", fontsize=8)
    axes.set_title(f"LLM-{llm}", fontsize=10)


def _saved(figure: Figure, record: Record, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['script'].replace('/', '_')}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path
