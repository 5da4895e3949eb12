"""Bars of our values from result files, for figures that a paper prints only as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.figure import GREEN, LIGHT, SKY, Bars, Grid, Series

Record = Mapping[str, Any]

METHODS = {
    "encoders_replicated": ("encoders replicated", LIGHT),
    "encoders_colocated": ("encoders colocated", SKY),
    "fsdp": ("FSDP", LIGHT),
    "megatron": ("Megatron*", SKY),
    "cornstarch": ("Cornstarch", GREEN),
}


def has_throughputs(record: Record) -> bool:
    """Whether a result is of a figure of throughputs by method."""
    return any(key.endswith("/tput_low") for key in record["ours"])


def throughputs(record: Record) -> Grid:
    """One panel per LLM, a group of bars per model, a bar per method with its range."""
    ours = record["ours"]
    models = dict.fromkeys(tuple(key.split("/")[1:3]) for key in ours if key.endswith("/tput"))
    panels = [
        _panel(ours, llm, [model for llm_of_model, model in models if llm_of_model == llm])
        for llm in dict.fromkeys(llm for llm, _ in models)
    ]
    title = f"{record['script']}: range over what is not stated"
    return Grid(rows=[panels], title=title, panel_inches=(6.0, 4.4))


def _panel(ours: Mapping[str, float], llm: str, models: Sequence[str]) -> Bars:
    methods = [method for method in METHODS if any(f"/{method}/tput" in key for key in ours)]
    return Bars(
        title=f"LLM-{llm}",
        y="inputs / s / GPU, simulated",
        names=models,
        series=[
            _bars(ours, method, [f"modelled/{llm}/{m}/{method}/tput" for m in models]) for method in methods
        ],
        slant=45,
    )


def _bars(ours: Mapping[str, float], method: str, keys: Sequence[str]) -> Series:
    label, colour = METHODS[method]
    down = [ours[key] - ours[f"{key}_low"] for key in keys]
    up = [ours[f"{key}_high"] - ours[key] for key in keys]
    return Series(values=[ours[key] for key in keys], colour=colour, label=label, errors=(down, up))
