"""Section 4.7 with costs that the balancer has not seen, with recomputation, and on other charts.

Paper:   I. Jang, dissertation, sections 4.7.2 and 4.7.4: "up to 1.40x" and "up to 10.6x" are of runs on GPUs,
         whose exact seconds no balancer has.
Setup:   as `experiments.entrain.figure4_12`. By study: every microbatch's pass off by a normal error of 3 %
         (`noise`, also with the printed stages); attention twice as slow as the balancer assumes
         (`attention`); the encoder's forward once more in its backward for all (`recompute`); SynthChartNet
         with half or twice the text, and with charts of 72 or 200 dpi instead of the 120 that the corpus
         assumes (`charts`).
Differs: sizes of samples are ours.
Ours:    reads the series of these studies, see `experiments.entrain.series`.
"""

from experiments.entrain.figure4_12 import speedups, why_slower
from experiments.entrain.series import OWN, STUDIES, Figures, Study, kept_series
from experiments.harness.outcome import About, Evidence
from experiments.harness.script import Parts, script

SHOWN = ("noise", "printed-noise", "attention", "recompute", "charts")
BASELINES = ("1f1b", "disttrain", OWN, "dip", "entrain-in-turn")


def data_set_evidence(study: Study, llm: str, dataset: str, methods: dict[str, Figures]) -> Evidence:
    """Evidence comparing Entrain with the baselines on one data set."""
    evidence = Evidence()
    where = f"{study.name}: {dataset}, {llm}"
    speedup_over = speedups(methods, "entrain")
    for method in BASELINES:
        evidence.ours[f"modelled/{study.name}/{llm}/{dataset}/entrain_over_{method}"] = speedup_over[
            method
        ].mean
    for method in BASELINES:
        evidence.claim(
            f"{where}: Entrain is not slower than {method} ({speedup_over[method]});",
            speedup_over[method].high >= 1,
            About.METHODS if method == "entrain-in-turn" else About.PAPER,
            cause=why_slower(method, dataset, llm, study),
        )
    return evidence


@script(profile="A40")
def run() -> Parts:
    return [
        data_set_evidence(STUDIES[name], llm, dataset, methods)
        for name in SHOWN
        for llm, series in kept_series(STUDIES[name]).items()
        for dataset, methods in series.items()
    ]
