"""Figure 5: sizes of text and image subsequences, and images in a sample of 8,192 tokens, are skewed.

Paper:   Z. Zhang et al., "DistTrain", section 2.3, Figure 5; the curves are not printed as numbers.
Setup:   LAION-400M, a token for 16 x 16 pixels, images and captions interleaved to 8,192 tokens.
Given:   that all three distributions are highly skewed.
Differs: the data set is not available; sizes are drawn from `laion-interleaved-like`, whose shapes are
         assumed, so the drawing shows what the other experiments use and proves nothing of LAION. Its counts
         of images are less skewed than the figure's.
Ours:    2,000 samples; about 5 s.
Run:     python -m experiments.disttrain.figure5 [--json]
"""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from scipy.stats import skew

from experiments import paper
from experiments.evidence import Evidence, outcome_of
from experiments.paper import RESULTS, Outcome
from workbench.data.corpora import corpus

CORPUS, PATCH_PX, NUM_SAMPLES, SEED = "laion-interleaved-like", 16, 2000, 5
PLOT = RESULTS / "plots" / "disttrain_figure5.png"
SKEWED = 0.5  # of the third standardised moment: beyond it a distribution is not called symmetric


def distributions() -> dict[str, NDArray[np.float64]]:
    """Text tokens and image tokens of subsequences, and images by sample."""
    samples = corpus(CORPUS).draw(NUM_SAMPLES, SEED)
    texts = [tokens for sample in samples for tokens in sample.text_tokens if tokens]
    sides = [side for sample in samples for side in sample.images]
    images = [-(-height // PATCH_PX) * -(-width // PATCH_PX) for height, width in sides]
    return {
        "text tokens of a subsequence": np.array(texts, float),
        "image tokens of a subsequence": np.array(images, float),
        "images of a sample": np.array([len(sample.images) for sample in samples], float),
    }


def run() -> Outcome:
    """Skewness of the three, and the drawing."""
    evidence = Evidence()
    found = distributions()
    for name, values in found.items():
        skewness, key = float(skew(values)), name.replace(" ", "_")
        low, middle, high = np.percentile(values, (5, 50, 95))
        evidence.ours |= {f"modelled/{key}/skewness": skewness, f"modelled/{key}/p50": float(middle)}
        evidence.notes.append(f"{name}: 5 % {low:.0f}, median {middle:.0f}, 95 % {high:.0f}")
        evidence.claim(f"{name}: skewed to the right ({skewness:.2f});", skewness > SKEWED)
    draw(found, PLOT)
    return outcome_of("disttrain/figure5", [evidence])


def draw(found: Mapping[str, NDArray[np.float64]], path: Path) -> Path:
    """One cumulative distribution a panel."""
    figure, axes = plt.subplots(1, len(found), figsize=(12, 3.2), layout="constrained")
    for panel, (name, values) in zip(axes, found.items(), strict=True):
        panel.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), color="#2166ac")
        panel.set(xlabel=name, ylim=(0, 1), xlim=(0, np.percentile(values, 99.5)))
    axes[0].set_ylabel("share at most")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
