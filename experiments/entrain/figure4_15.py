"""Figures 4.15 and C.8 to C.10: Entrain's step time under every split of the stages.

Paper:   I. Jang, dissertation, section 4.7.3, Figure 4.15; appendix C.6. "The throughput drops significantly
         by 85 % if a bad parallel configuration is used."
Setup:   512 samples, 4 replicas of 16 A40s, tp 2, so 8 stages a replica; 1 + 7 to 7 + 1 of them.
Given:   the 85 %. Curves are not printed, nor which splits are in the figure.
Differs: sizes of samples are ours. Throughput is one over step time without messages, five batches a split.
Ours:    about 5 s a panel.
Run:     python -m experiments.entrain.figure4_15 [--json]
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from experiments import paper
from experiments.entrain.replica import BLOCKS
from experiments.entrain.series import batch, batch_figures, stable_stages
from experiments.entrain.workload import CORPUS_OF, LLM_OF
from experiments.evidence import Evidence, outcome_of
from experiments.modelled import A40
from experiments.paper import RESULTS, Outcome, PaperNumber

BATCHES = 5
PLOT = RESULTS / "plots" / "entrain_figure4_15.png"

Split = tuple[int, int]


def steps_s(dataset: str, llm: str, num_batches: int = BATCHES) -> dict[Split, float]:
    """Split -> mean seconds of Entrain's step over a few batches."""
    drawn = [batch(dataset, llm, seed) for seed in range(1, num_batches + 1)]
    splits = [(stages, BLOCKS - stages) for stages in range(1, BLOCKS)]
    return {
        split: statistics.fmean(batch_figures("entrain", replace(each, stages=split))[0] for each in drawn)
        for split in splits
    }


def panel_evidence(dataset: str, llm: str, found: Mapping[Split, float]) -> Evidence:
    """The split of the mean ratio against all others."""
    evidence = Evidence()
    where, key = f"{dataset}, {llm}", f"modelled/{llm}/{dataset}"
    chosen, best_s = stable_stages(dataset, llm), min(found.values())
    for (encoder, text), seconds in found.items():
        evidence.ours[f"{key}/{encoder}+{text}_relative_throughput"] = best_s / seconds
    listed = " ".join(f"{e}+{t} {best_s / s:.2f}" for (e, t), s in found.items())
    evidence.notes.append(f"{where}: throughput over the best: {listed}; derived {chosen[0]}+{chosen[1]}")
    evidence.claim(
        f"{where}: the derived split is within 2 % of the best ({best_s / found[chosen]:.3f});",
        best_s / found[chosen] > 0.98,
    )
    return evidence


def run() -> Outcome:
    """All panels, the largest drop, and the drawing."""
    every = {(llm, dataset): steps_s(dataset, llm) for llm in LLM_OF for dataset in CORPUS_OF}
    parts = [panel_evidence(dataset, llm, found) for (llm, dataset), found in every.items()]
    summary = Evidence()
    drop = max(1 - min(found.values()) / max(found.values()) for found in every.values())
    summary.add(PaperNumber("modelled/largest_drop", 0.85, "fraction", "section 4.7.3", rel_tol=0.1), drop)
    draw(every, PLOT)
    return outcome_of("entrain/figure4_15", [summary, *parts], profile=A40)


def draw(every: Mapping[tuple[str, str], Mapping[Split, float]], path: Path) -> Path:
    """Bars of relative throughput; black is the derived split, as printed."""
    figure, axes = plt.subplots(2, 4, figsize=(14, 5), sharey=True, layout="constrained")
    for panel, ((llm, dataset), found) in zip(axes.flat, every.items(), strict=False):
        best_s, chosen = min(found.values()), stable_stages(dataset, llm)
        panel.bar(
            [f"{e}:{t}" for e, t in found],
            [best_s / seconds for seconds in found.values()],
            color=["black" if split == chosen else "#9ecae1" for split in found],
        )
        panel.set_title(f"{dataset}, {llm}", fontsize=9)
    axes[0][0].set_ylabel("throughput over the best")
    axes[1][0].set_ylabel("throughput over the best")
    figure.suptitle("encoder : LLM stages; black: of the data set's mean ratio", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
