"""Figures 4.16 and C.11 to C.13: forward time of every microbatch, by module, system and replica.

Paper:   I. Jang, dissertation, section 4.7.4, Figure 4.16; appendix C.7. No values are printed.
Setup:   one batch of 512 samples in 4 replicas of 32 microbatches; forwards summed over a module's stages.
Differs: sizes of samples are ours. A spread is the standard deviation over a replica's microbatches.
Ours:    draws the lines; checks that in every panel the least even of Entrain's replicas is evener than the
         evenest of the others'. About 5 s.
Run:     python -m experiments.entrain.figure4_16 [--json]
"""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from experiments import paper
from experiments.entrain.methods import METHODS, replicas_of
from experiments.entrain.series import NUM_REPLICAS, batch
from experiments.entrain.stage_work import Seconds
from experiments.entrain.workload import CORPUS_OF, LLM_OF
from experiments.evidence import Evidence, outcome_of
from experiments.modelled import A40
from experiments.paper import RESULTS, Outcome
from workbench.units import MS_PER_S

PLOT = RESULTS / "plots" / "entrain_figure4_16.png"
SYSTEMS = {"disttrain": "#d95f02", "dip": "#7570b3", "entrain": "#1b9e77"}
MODULES = ("vision", "llm")
SEED = 1

Lines = dict[tuple[str, str], list[Seconds]]  # (module, system) -> by replica, seconds by microbatch


def lines_of(dataset: str, llm: str) -> Lines:
    """One batch under the three systems."""
    found: Lines = {}
    for system in SYSTEMS:
        for replica in replicas_of(system, batch(dataset, llm, SEED), NUM_REPLICAS):
            taken = METHODS[system](replica)
            for module, seconds in zip(MODULES, taken[1:], strict=True):
                found.setdefault((module, system), []).append(seconds)
    return found


def panel_evidence(dataset: str, llm: str, found: Lines) -> Evidence:
    """Spreads of one data set and model."""
    evidence = Evidence()
    for module in MODULES:
        spreads = {s: [float(of.std()) * MS_PER_S for of in found[module, s]] for s in SYSTEMS}
        for system, each in spreads.items():
            evidence.ours[f"modelled/{llm}/{dataset}/{module}/{system}_std_ms"] = max(each)
        others = min(min(each) for system, each in spreads.items() if system != "entrain")
        worst = max(spreads["entrain"])
        evidence.claim(
            f"{dataset}, {module} of {llm}: Entrain's replicas are all evener "
            f"({worst:.1f}, others from {others:.1f} ms);",
            worst < others,
        )
    return evidence


def run() -> Outcome:
    """All panels, and the drawing."""
    every = {(llm, dataset): lines_of(dataset, llm) for llm in LLM_OF for dataset in CORPUS_OF}
    draw(every, PLOT)
    parts = [panel_evidence(dataset, llm, found) for (llm, dataset), found in every.items()]
    return outcome_of("entrain/figure4_16", parts, profile=A40)


def draw(every: Mapping[tuple[str, str], Lines], path: Path) -> Path:
    """A column a data set, a row a model and module, a line a replica."""
    figure, axes = plt.subplots(4, 4, figsize=(15, 9), sharex=True, layout="constrained")
    for number, ((llm, dataset), found) in enumerate(every.items()):
        for part, module in enumerate(MODULES):
            panel = axes[2 * (number // 4) + part][number % 4]
            for system, color in SYSTEMS.items():
                for replica, seconds in enumerate(found[module, system]):
                    label = system if replica == 0 else None
                    panel.plot(seconds * MS_PER_S, color=color, linewidth=0.7, label=label)
            panel.set_title(f"{dataset}, {module} of {llm}", fontsize=8)
            panel.set_ylim(bottom=0)
    for row in axes:
        row[0].set_ylabel("forward, ms")
    axes[0][0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
