"""Figures 4.16 and C.11 to C.13: forward time of every microbatch, by module, system and replica.

Paper:   I. Jang, dissertation, section 4.7.4, Figure 4.16; appendix C.7. No values are printed.
Setup:   one batch of 512 samples in 4 replicas of 32 microbatches; forwards summed over a module's stages.
Differs: sizes of samples are ours. A spread is the standard deviation over a replica's microbatches.
Ours:    draws the lines; checks that in every panel the least even of Entrain's replicas is evener than the
         evenest of the others'. About 5 s.
"""

from collections.abc import Mapping

from experiments.entrain.methods import METHODS, replicas_of
from experiments.entrain.series import NUM_REPLICAS, batch
from experiments.entrain.stage_work import Seconds
from experiments.entrain.workload import CORPUS_OF, LLM_OF, PANELS
from experiments.harness.figure import BLUE, GREEN, ORANGE, Grid, Line, Lines, Panel, wrapped
from experiments.harness.outcome import Evidence
from experiments.harness.script import Parts, script
from workbench.units import MS_PER_S

SYSTEMS = {"disttrain": ORANGE, "dip": BLUE, "entrain": GREEN}
MODULES = ("vision", "llm")
SEED = 1

Forwards = dict[tuple[str, str], list[Seconds]]  # (module, system) -> by replica, seconds by microbatch


def lines_of(dataset: str, llm: str) -> Forwards:
    """Forward times of one batch under the three systems."""
    forwards: Forwards = {}
    for system in SYSTEMS:
        for replica in replicas_of(system, batch(dataset, llm, SEED), NUM_REPLICAS):
            outcome = METHODS[system](replica)
            for module, seconds in zip(MODULES, outcome[1:], strict=True):
                forwards.setdefault((module, system), []).append(seconds)
    return forwards


def panel_evidence(dataset: str, llm: str, forwards: Forwards) -> Evidence:
    """Evidence on the spreads of one data set and model."""
    evidence = Evidence()
    for module in MODULES:
        spreads = {
            s: [float(replica_s.std()) * MS_PER_S for replica_s in forwards[module, s]] for s in SYSTEMS
        }
        for system, spreads_ms in spreads.items():
            evidence.ours[f"modelled/{llm}/{dataset}/{module}/{system}_std_ms"] = max(spreads_ms)
        least_other = min(min(spreads_ms) for system, spreads_ms in spreads.items() if system != "entrain")
        worst = max(spreads["entrain"])
        evidence.claim(
            f"{dataset}, {module} of {llm}: Entrain's replicas are all evener "
            f"({worst:.1f}, others from {least_other:.1f} ms);",
            worst < least_other,
            cause="the claim compares the least even of Entrain's replicas with the evenest of all others; "
            "the least even are "
            f"{', '.join(f'{max(ms):.1f} ms ({system})' for system, ms in spreads.items())}",
        )
    return evidence


def drawing(forwards_of_panel: Mapping[tuple[str, str], Forwards]) -> Grid:
    """One column per data set, one row per model and module, one line per replica."""
    panels: list[Panel] = [
        Lines(
            title=f"{dataset}, {module} of {llm}",
            x="microbatch",
            y="forward, ms",
            y_limits=(0, None),
            lines=[
                Line(
                    x=range(len(replica_s)),
                    y=(replica_s * MS_PER_S).tolist(),
                    colour=colour,
                    label=system,
                    width=0.7,
                )
                for system, colour in SYSTEMS.items()
                for replica_s in forwards_of_panel[llm, dataset][module, system]
            ],
        )
        for llm in LLM_OF
        for module in MODULES
        for dataset in CORPUS_OF
    ]
    return Grid(rows=wrapped(panels, len(CORPUS_OF)), panel_inches=(3.8, 2.3))


@script(profile="A40")
def run() -> Parts:
    forwards_of_panel = {(llm, dataset): lines_of(dataset, llm) for llm, dataset in PANELS}
    parts = [panel_evidence(dataset, llm, forwards) for (llm, dataset), forwards in forwards_of_panel.items()]
    parts[0].figures["entrain_figure4_16"] = drawing(forwards_of_panel)
    return parts
