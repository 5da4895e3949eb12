"""Spot traces: averages, fractions of time and throughput over time of every system, and their drawing."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.figure import BLUE, GREEN, GREY, ORANGE, Grid, Line, Lines, Panel
from experiments.harness.outcome import Evidence
from experiments.harness.record import results_folder
from experiments.oobleck.runs import breakdown, on_spot, runs
from experiments.oobleck.systems import DOLLARS_PER_NODE_H, MOST_NODES, spot_trace
from sim.failures.run import FailureRun, Spent

TRACES = {  # trace -> notice before a node goes, as the providers promise it
    "spot_ec2_p3_scaled30": 120.0,
    "spot_gcp_scaled30": 30.0,
    "spot_gcp_a100_scaled30": 30.0,
}
TITLES = {
    "spot_ec2_p3_scaled30": "EC2 P3",
    "spot_gcp_scaled30": "GCP as published",
    "spot_gcp_a100_scaled30": "GCP A100 log",
}
SYSTEMS = ("bamboo", "restart_24", "varuna", "varuna_no_ckpt", "oobleck")
DRAWN = {"bamboo": BLUE, "varuna": ORANGE, "oobleck": GREEN}
BIN_S = 600.0
NOTES = (
    "window: the whole trace, 10.6 to 26.5 h; the text says 12 h, which neither of its traces lasts",
    "the trace the paper calls GCP has the time stamps of an EC2 g4dn trace; spot_gcp_a100 is a real GCP "
    "log, scaled to 15..30 nodes by the same rule",
    "notice before a node goes: EC2 120 s, GCP 30 s (the paper says that warnings are used, not how long)",
)


def spot_evidence(models: Sequence[str]) -> Evidence:
    """Evidence: averages, effective fraction and cost per million samples of every system and trace."""
    evidence = Evidence(notes=list(NOTES))
    for model in models:
        for trace, notice_s in TRACES.items():
            rates, notes = {}, []
            for system in (name for name in SYSTEMS if runs(name, model)):
                run = on_spot(system, model, trace, notice_s)
                rates[system] = run.samples_per_s
                dollars = 1e6 * run.dollars_per_sample(DOLLARS_PER_NODE_H)
                effective = run.fraction(Spent.EFFECTIVE)
                notes.append(f"{system} {run.samples_per_s:.3g} ({effective:.0%}, ${dollars:,.0f})")
                evidence.ours.update(_values(f"published/{model.replace(' ', '-')}/{trace}/{system}", run))
            evidence.notes.append(
                f"{model}, {TITLES[trace]}, samples/s (effective time, dollars a million): {', '.join(notes)}"
            )
            best_other = max(rate for name, rate in rates.items() if name in DRAWN and name != "oobleck")
            evidence.claim(
                f"{model}, {TITLES[trace]}: Oobleck is ahead of or within 2 % of the others "
                f"({rates['oobleck']:.3g} against {best_other:.3g} samples/s);",
                rates["oobleck"] >= 0.98 * best_other,
            )
    return evidence


def _values(key: str, run: FailureRun) -> dict[str, float]:
    values = {f"{key}/{name}": share for name, share in breakdown(run).items()}
    values[f"{key}/samples_per_s"] = run.samples_per_s
    if run.samples:
        values[f"{key}/dollars_per_million"] = run.dollars_per_sample(DOLLARS_PER_NODE_H) * 1e6
    return values


def in_bins(run: FailureRun) -> list[float]:
    """[bins] average samples per second in bins of 10 minutes, of which the last may be shorter.

    Iterations are spread evenly over their time.
    """
    samples = [0.0] * math.ceil(run.window_s / BIN_S)
    for iteration in run.iterations:
        if not iteration.samples:
            continue
        rate = iteration.samples / (iteration.end_s - iteration.start_s)
        for index in range(int(iteration.start_s // BIN_S), math.ceil(iteration.end_s / BIN_S)):
            start_s, end_s = index * BIN_S, (index + 1) * BIN_S
            samples[index] += rate * max(0.0, min(iteration.end_s, end_s) - max(iteration.start_s, start_s))
    return [count / lasts_s for count, lasts_s in zip(samples, bin_lengths_s(run.window_s), strict=True)]


def bin_lengths_s(window_s: float) -> list[float]:
    """[bins] seconds of each."""
    return [min(BIN_S, window_s - index * BIN_S) for index in range(math.ceil(window_s / BIN_S))]


def write_series(script: str, models: Sequence[str]) -> Path:
    """Store the throughput over time, which the plots read, beside the result of a script."""
    series = {
        model: {
            trace: {
                "nodes": [list(step) for step in spot_trace(trace).num_nodes()],
                "samples_per_s": {
                    name: [round(rate, 4) for rate in in_bins(on_spot(name, model, trace, notice_s))]
                    for name in DRAWN
                    if runs(name, model)
                },
                "mean": {
                    name: on_spot(name, model, trace, notice_s).samples_per_s
                    for name in DRAWN
                    if runs(name, model)
                },
            }
            for trace, notice_s in TRACES.items()
        }
        for model in models
    }
    path = results_folder() / f"{script.replace('/', '_')}_series.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"bin_s": BIN_S, "series": series}) + "\n")
    return path


def drawing(path: Path) -> Grid:
    """One panel per model and trace from a file of series: throughput, and the nodes in a strip below."""
    stored = json.loads(path.read_text())
    series: Mapping[str, Mapping[str, Any]] = stored["series"]
    rows: list[list[Panel | None]] = []
    for trace in TRACES:
        series_of_model = {model: by_trace[trace] for model, by_trace in series.items()}
        rows.append(
            [
                _throughput(f"{model}, {TITLES[trace]}", model_series, stored["bin_s"])
                for model, model_series in series_of_model.items()
            ]
        )
        rows.append([_nodes(model_series["nodes"]) for model_series in series_of_model.values()])
    heights = [1.0, 0.4] * len(TRACES)
    return Grid(rows=rows, title="dotted: averages", panel_inches=(4.6, 2.9), heights=heights)


def _throughput(title: str, series: Mapping[str, Any], bin_s: float) -> Lines:
    """Lines of throughput in bins, with dotted averages."""
    lines = []
    for name, rates in series["samples_per_s"].items():
        hours = [(index + 0.5) * bin_s / 3600 for index in range(len(rates))]
        means = [series["mean"][name]] * 2
        lines.append(Line(x=hours, y=rates, colour=DRAWN[name], label=name))
        lines.append(Line(x=(hours[0], hours[-1]), y=means, colour=DRAWN[name], style=":"))
    return Lines(title=title, y="samples/s", y_limits=(0, None), lines=lines)


def _nodes(nodes: Sequence[Sequence[float]]) -> Lines:
    hours, counts = [time_s / 3600 for time_s, _ in nodes], [count for _, count in nodes]
    strip = Line(x=hours, y=counts, colour=GREY, step=True, width=0.8)
    return Lines(x="hours", y="nodes", y_limits=(0, MOST_NODES + 2), lines=[strip])
