"""Figures 4.3 to 4.5: sizes vary independently, single samples' ratios scatter, and batches' ratios settle.

Paper:   I. Jang, dissertation, section 4.2.2, Figures 4.3, 4.4, 4.5; mean ratios 2.43 and 1.27.
Setup:   vision over LLM work of samples and of batches of 1 to 1,024 samples, 200 batches a size.
Given:   the two means.
Differs: sizes are ours and so are layer times, so the means are compared only as numbers; a FLOP-free ratio
         of GPU seconds depends on the A40's efficiency for each module. Figure 4.6, bubbles by method, is
         what `experiments.entrain.figure4_12` measures as step times.
Ours:    20,000 samples a data set; about 10 s.
Run:     python -m experiments.entrain.figure4_5 [--json]
"""

import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt

from experiments import paper
from experiments.entrain.stage_work import tokens_of
from experiments.entrain.workload import CORPUS_OF, batch_draws, batch_of, work_pool
from experiments.evidence import Evidence, outcome_of
from experiments.modelled import A40
from experiments.paper import RESULTS, Outcome, PaperNumber

SIZES = (1, 4, 16, 64, 256, 1024)
NUM_BATCHES, NUM_SAMPLES = 200, 2000
PLOT = RESULTS / "plots" / "entrain_figure4_5.png"
PRINTED = {("LLaVA-150k", "Llama3-1b"): 2.43, ("SynthChartNet", "Llama3-3b"): 1.27}


def mean_ratio(dataset: str, llm: str) -> float:
    """Vision over LLM seconds of the whole data set."""
    work = work_pool(dataset, llm)
    return sum(work.encoder_s) / sum(work.llm_s)


def spreads(dataset: str, llm: str) -> tuple[float, ...]:
    """Coefficient of variation of the ratio over batches of each size."""
    draw = batch_draws(dataset, llm, seed=1)
    found = []
    for size in SIZES:
        ratios = [vision / text for vision, text in (draw(size) for _ in range(NUM_BATCHES))]
        found.append(statistics.stdev(ratios) / statistics.fmean(ratios))
    return tuple(found)


def data_set_evidence(dataset: str) -> Evidence:
    """Correlation of sizes, scatter of single samples, convergence."""
    evidence = Evidence()
    samples = batch_of(dataset, NUM_SAMPLES, 1)
    vision, total = tokens_of(samples, "vision"), tokens_of(samples, "llm")
    text = total - np.array([sum(s.tokens_out for s in sample.of("vision")) for sample in samples])
    correlation = float(np.corrcoef(vision, text)[0, 1])
    percentiles = {name: np.percentile(of, (5, 50, 95)) for name, of in (("vision", vision), ("text", text))}
    key = f"modelled/{dataset}"
    evidence.ours[f"{key}/correlation"] = correlation
    for name, (low, middle, high) in percentiles.items():
        evidence.ours |= {f"{key}/{name}_p5": low, f"{key}/{name}_p50": middle, f"{key}/{name}_p95": high}
    evidence.claim(
        f"{dataset}: vision and text tokens vary independently (correlation {correlation:+.2f});",
        abs(correlation) < 0.3,
    )
    found = spreads(dataset, "Llama3-1b")
    for size, spread in zip(SIZES, found, strict=True):
        evidence.ours[f"{key}/ratio_variation_at_{size}"] = spread
    listed = " ".join(f"{each:.3f}" for each in found)
    evidence.claim(
        f"{dataset}: the ratio's variation falls with the batch ({listed});",
        list(found) == sorted(found, reverse=True),
    )
    return evidence


def run() -> Outcome:
    """All data sets, and the two printed means."""
    means = Evidence()
    for (dataset, llm), value in PRINTED.items():
        number = PaperNumber(
            f"modelled/{dataset}/{llm}/mean_ratio", value, "ratio", "4.2.2, 4.7.3", rel_tol=0.1
        )
        means.add(number, mean_ratio(dataset, llm))
    draw(PLOT)
    return outcome_of("entrain/figure4_5", [means, *map(data_set_evidence, CORPUS_OF)], profile=A40)


def draw(path: Path) -> Path:
    """By data set: distributions of tokens, ratios of 100 single samples, ratios of batches by size."""
    figure, axes = plt.subplots(3, 4, figsize=(14, 8), layout="constrained")
    for column, dataset in enumerate(CORPUS_OF):
        samples = batch_of(dataset, NUM_SAMPLES, 1)
        vision, total = tokens_of(samples, "vision"), tokens_of(samples, "llm")
        text = total - np.array([sum(s.tokens_out for s in sample.of("vision")) for sample in samples])
        for name, tokens in (("vision", vision), ("text", text)):
            axes[0][column].plot(np.sort(tokens), np.linspace(0, 1, len(tokens)), label=name)
        axes[0][column].set(title=dataset, xlabel="tokens", xscale="log")
        draws = batch_draws(dataset, "Llama3-1b", seed=1)
        ratios = {size: [v / t for v, t in (draws(size) for _ in range(NUM_BATCHES))] for size in SIZES}
        axes[1][column].plot(ratios[1][:100], ".", markersize=3)
        axes[1][column].set(xlabel="sample", ylim=(0, None))
        axes[2][column].boxplot(list(ratios.values()), tick_labels=list(map(str, SIZES)), sym=".")
        axes[2][column].set_xlabel("samples of a batch")
    axes[0][0].set_ylabel("share at most (4.3)")
    axes[0][0].legend(fontsize=8)
    axes[1][0].set_ylabel("vision over LLM (4.4)")
    axes[2][0].set_ylabel("vision over LLM (4.5)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
    return path


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
