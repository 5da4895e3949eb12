"""Figure 2.11 and Figure 2.1: fractions of training time by cause when nodes fail.

Paper:   I. Jang, dissertation, section 2.7.4.2, Figure 2.11, and section 2.2.3, Figure 2.1; the figures'
         numbers are not printed, the text's bounds are.
Setup:   as Table 2.2, BERT-Large and GPT-3 6.7b, a failure every 6 h and every 10 min.
Given:   as Table 2.2; the share of Bamboo's iterations that is useful, 0.1971, from the published simulator.
Ours:    the failure simulator, fractions of the window; they sum up to 1. Both plots read the result.
"""

from collections.abc import Mapping, Sequence

from experiments.harness.figure import BLACK, BLUE, GREEN, GREY, LIGHT, ORANGE, RED, Bars, Grid, Series
from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.oobleck.runs import WINDOW, breakdown, controlled, runs
from experiments.oobleck.systems import MODELS as ALL_MODELS

MODELS, INTERVALS, SYSTEMS = ("BERT-Large", "GPT-3 6.7b"), ("6h", "10m"), ("bamboo", "varuna", "oobleck")
COLOURS = {
    "effective": GREEN,
    "redundant": BLUE,
    "idle_nodes": LIGHT,
    "checkpoint": ORANGE,
    "recovery": RED,
    "lost": BLACK,
    "waiting": GREY,
}
TITLES = {model.replace(" ", "-"): model for model in ALL_MODELS}
FIGURES = {"figure2_1": ("bamboo", "varuna"), "figure2_11": ("bamboo", "varuna", "oobleck")}


def breakdown_evidence() -> Evidence:
    """Evidence of every bar of the figure, and the text's bounds."""
    evidence = Evidence(notes=[WINDOW])
    worst_waste, least_effective = 0.0, 1.0
    for model in MODELS:
        for interval in INTERVALS:
            for system in (name for name in SYSTEMS if runs(name, model)):
                parts = breakdown(controlled(system, model, interval))
                key = f"published/{model.replace(' ', '-')}/{interval}/{system}"
                evidence.ours.update({f"{key}/{name}": share for name, share in parts.items()})
                if system == "varuna":
                    worst_waste = max(worst_waste, parts["lost"] + parts["recovery"])
                if system == "oobleck":
                    least_effective = min(least_effective, parts["effective"])
                if system == "bamboo":
                    share = parts["redundant"]
                    evidence.claim(
                        f"Bamboo, {model}, {interval}: more than half is redundant (ours {share:.0%});",
                        share > 0.5,
                    )
    evidence.claim(
        f"Oobleck trains effectively for at least 75 % of the time (ours {least_effective:.0%});",
        least_effective >= 0.75,
    )
    evidence.claim(
        f"Varuna loses up to 75 % to going back (ours {worst_waste:.0%}, restarts included);",
        worst_waste >= 0.75,
    )
    return evidence


def bars_by_model(
    ours: Mapping[str, float], systems: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Model -> "interval, system" -> part -> fraction of the window, for some systems."""
    bars_of: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in ours.items():
        _, model, interval, system, part = key.split("/")
        if system in systems:
            bars_of.setdefault(model, {}).setdefault(f"{interval}\n{system}", {})[part] = value
    return bars_of


def drawings(ours: Mapping[str, float]) -> dict[str, Grid]:
    """The drawings of both figures: one panel per model, one bar per interval and system."""
    return {
        f"oobleck_{name}": Grid(
            rows=[[_panel(model, bars) for model, bars in bars_by_model(ours, systems).items()]],
            panel_inches=(5.5, 4.0),
        )
        for name, systems in FIGURES.items()
    }


def _panel(model: str, bars: Mapping[str, Mapping[str, float]]) -> Bars:
    parts = [
        Series(
            values=[fractions.get(part, 0.0) for fractions in bars.values()],
            colour=colour,
            label=part.replace("_", " "),
        )
        for part, colour in COLOURS.items()
    ]
    return Bars(
        title=TITLES[model],
        y="fraction of the time",
        y_limits=(0, 1),
        names=list(bars),
        series=parts,
        stacked=True,
    )


@script()
def run() -> Evidence:
    evidence = breakdown_evidence()
    evidence.figures = drawings(evidence.ours)
    return evidence
