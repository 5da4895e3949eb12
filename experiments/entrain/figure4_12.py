"""Figure 4.12: step times over many batches, Entrain against every other method.

Paper:   I. Jang, dissertation, section 4.7.2, Figure 4.12; printed is only "up to 1.40x".
Setup:   512 samples, 4 replicas, 16 A40s each, tp 2; per batch the ratio of two times; 95 % intervals by
         bootstrap over batches.
Given:   nothing printed. Batches are those of `experiments.entrain.series`; the first one is computed anew.
Differs: sizes of samples are ours. DistTrain is shown twice: with Entrain's stages, and with those of one
         sample, as the paper runs it. Messages take no time; Optimus is a greedy rule that favours it.
         DIP and Optimus colocate: all ranks do both modules' work, so that no ratio of GPUs has to be
         rounded and no module waits for the other. They beat plain Entrain here, which the paper does not
         find; whether their activations fit is `experiments.entrain.figure4_14`. `entrain-graded` is ours:
         small microbatches at both ends, an order for the pipeline, and one block of ranks that holds the
         end of the encoder and the beginning of the LLM. It is held against all methods but Optimus, whose
         rule is a bound rather than a plan.
Ours:    reads the series; about 10 s.
Run:     python -m experiments.entrain.figure4_12 [--json]
"""

from experiments.cornstarch.modelled import A40
from experiments.entrain.intervals import Interval, bootstrap
from experiments.entrain.methods import METHODS
from experiments.entrain.series import BATCHES, OWN, Figures, batch, batch_figures, kept_series, stable_stages
from experiments.harness.figure import GREEN, LIGHT, Bars, Grid, Series
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.script import Parts, main, script

APART = ("1f1b", "disttrain", OWN, "disttrain-vpp")  # baselines that give modules ranks of their own
SHARED = ("dip", "optimus")
OURS = "entrain-graded"
SAME = 1e-4  # figures are kept to five digits


def speedups(methods: dict[str, Figures], subject: str) -> dict[str, Interval]:
    """Method -> how many times as long as the subject it takes, over the batches that both have seen."""
    own_s = methods[subject]["seconds"]
    return {
        method: bootstrap([other / own for other, own in zip(figures["seconds"], own_s, strict=False)])
        for method, figures in methods.items()
        if method != subject
    }


def data_set_evidence(llm: str, dataset: str, methods: dict[str, Figures]) -> Evidence:
    """One panel of the figure."""
    evidence = Evidence()
    where = f"{dataset}, {llm}"
    key = f"modelled/{llm}/{dataset}"
    again_s = batch_figures("entrain", batch(dataset, llm, 1))[0]
    kept_s = methods["entrain"]["seconds"]
    evidence.claim(f"{where}: at least {BATCHES} batches ({len(kept_s)});", len(kept_s) >= BATCHES)
    evidence.claim(
        f"{where}: the kept series is what the code gives;",
        abs(again_s / kept_s[0] - 1) < SAME,
    )
    stages = stable_stages(dataset, llm)
    evidence.notes.append(f"{where}: {stages[0]} + {stages[1]} stages, Entrain {again_s:.3f} s at batch 1")
    for subject in ("entrain", OURS):
        for method, interval in speedups(methods, subject).items():
            if not method.startswith(OURS):
                evidence.ours[f"{key}/{subject}_over_{method}"] = interval.mean
                evidence.notes.append(f"{where}: {subject} over {method} {interval}")
    over = speedups(methods, "entrain")
    for method in (*APART, *SHARED):
        evidence.claim(
            f"{where}: Entrain is not slower than {method} ({over[method]});", over[method].high >= 1
        )
    ours = speedups(methods, OURS)
    for method in (*APART, "exchanges", "dip", "entrain", "entrain-zb"):
        evidence.claim(f"{where}: {OURS} is faster than {method} ({ours[method]});", ours[method].low > 1)
    return evidence


@script(profile=A40)
def run() -> Parts:
    """All panels for which there is a series; draws them."""
    every = kept_series()
    parts = [
        data_set_evidence(llm, dataset, methods)
        for llm, series in every.items()
        for dataset, methods in series.items()
    ]
    most = max(
        speedups(methods, "entrain")[method].mean
        for series in every.values()
        for methods in series.values()
        for method in (OWN, "dip")
    )
    summary = Evidence()
    summary.add(PaperNumber("modelled/most", 1.40, "times", "section 4.7", rel_tol=0.15), most)
    summary.figures["entrain_figure4_12"] = drawing(every)
    return [summary, *parts]


def drawing(every: dict[str, dict[str, dict[str, Figures]]]) -> Grid:
    """Mean speed over plain 1F1B by method with its interval; Entrain and ours in colour."""
    rows = [
        [_panel(f"{dataset}, {llm}", methods) for dataset, methods in series.items()]
        for llm, series in every.items()
    ]
    return Grid(rows=rows, panel_inches=(4.0, 3.8), shares_y="all")


def _panel(title: str, methods: dict[str, Figures]) -> Bars:
    names = (*METHODS, OWN)
    over = [over_plain(methods, name) for name in names]
    means = [each.mean for each in over]
    errors = ([each.mean - each.low for each in over], [each.high - each.mean for each in over])
    colours = [GREEN if name.startswith("entrain") else LIGHT for name in names]
    series = Series(values=means, colour=colours, errors=errors)
    return Bars(title=title, y="times as fast as 1F1B", names=names, series=[series], level=1, slant=60)


def over_plain(methods: dict[str, Figures], name: str) -> Interval:
    """How many times as long plain 1F1B takes."""
    pairs = zip(methods["1f1b"]["seconds"], methods[name]["seconds"], strict=False)
    return bootstrap([plain / own for plain, own in pairs])


if __name__ == "__main__":
    main(run)
