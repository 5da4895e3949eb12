"""Figure 4.12: step times over many batches, Entrain against every other method.

Paper:   I. Jang, dissertation, section 4.7.2, Figure 4.12; printed is only "up to 1.40x".
Setup:   512 samples, 4 replicas, 16 A40s of 48 GB each, tp 2; per batch the ratio of two times; 95 %
         intervals by bootstrap over batches. Twice: with stages by our costs, and with Tables 4.1 and C.1's.
Given:   nothing printed. Batches are those of `experiments.entrain.series`; the first one is computed again.
Differs: sizes of samples are ours. All methods stay within memory: Entrain's forwards run as far ahead as it
         allows (section 4.5.3), DIP takes windows where all microbatches do not fit, or recomputes its
         encoder where that is faster. DIP fixes sub-microbatches and recomputation on an earlier batch.
         DistTrain is shown twice: with Entrain's stages, and with those of one sample, as the paper runs it;
         so is random order. Messages take no time; Optimus is a greedy rule that favours it. DIP and Optimus
         colocate: all ranks do both modules' work, so that no ratio of GPUs has to be rounded. Where the LLM
         has most of the work DIP beats plain Entrain, which the paper does not find.
         `entrain-graded` is ours: small microbatches at both ends, an order for the pipeline, and one block
         of ranks that has the end of the encoder and the beginning of the LLM. It is compared with all
         methods but Optimus, whose rule is a bound rather than a plan.
Ours:    reads the series; about 10 s.
"""

from experiments.entrain.intervals import Interval, bootstrap
from experiments.entrain.methods import dip_choice, dip_windows, replicas_of
from experiments.entrain.replica import BLOCKS
from experiments.entrain.series import (
    BATCHES,
    NUM_REPLICAS,
    OWN,
    OWN_STAGES,
    PLAIN_OWN,
    STUDIES,
    Figures,
    Layouts,
    Study,
    batch,
    command_of,
    encoder_share,
    excess,
    kept_series,
    printed_stages,
    study_figures,
)
from experiments.entrain.series import OURS as STUDY
from experiments.harness.figure import GREEN, LIGHT, Bars, Grid
from experiments.harness.figure import Series as Values
from experiments.harness.outcome import About, Evidence, PaperNumber
from experiments.harness.script import Parts, script

Series = dict[str, dict[str, dict[str, Figures]]]  # LLM -> data set -> method

APART = ("1f1b", PLAIN_OWN, "disttrain", OWN, "disttrain-vpp")  # modules on ranks of their own
SHARED = ("dip", "optimus")
PRINTED = ("disttrain", OWN, "dip")  # the paper's baselines
OURS = "entrain-graded"
SAME = 1e-4  # figures are kept to five digits


def speedups(methods: dict[str, Figures], subject: str) -> dict[str, Interval]:
    """Method -> its time over the subject's, for batches that both have seen."""
    subject_s = methods[subject]["seconds"]
    return {
        method: bootstrap(
            [
                method_time / subject_time
                for method_time, subject_time in zip(figures["seconds"], subject_s, strict=False)
            ]
        )
        for method, figures in methods.items()
        if method != subject
    }


def data_set_evidence(llm: str, dataset: str, methods: dict[str, Figures], study: Study = STUDY) -> Evidence:
    """Evidence of one panel of the figure."""
    evidence = Evidence()
    where = f"{dataset}, {llm}, {study.layouts} stages"
    key = f"modelled/{llm}/{dataset}" + ("" if study is STUDY else f"/{study.name}")
    recomputed_s = study_figures("entrain", dataset, llm, study, 1)[0]
    stored_s = methods["entrain"]["seconds"]
    evidence.claim(
        f"{where}: at least {BATCHES} batches ({len(stored_s)});",
        len(stored_s) >= BATCHES,
        About.BOOKKEEPING,
        cause=f"not computed yet: {command_of(llm, study)} adds the others",
    )
    evidence.claim(
        f"{where}: the kept series is what the code gives;",
        abs(recomputed_s / stored_s[0] - 1) < SAME,
        About.BOOKKEEPING,
        cause=f"cost model or methods have changed since: Entrain's first batch takes {recomputed_s:.3f} s, "
        f"{stored_s[0]:.3f} s in the series; without its file, {command_of(llm, study)} makes it anew",
    )
    first = batch(dataset, llm, 1, study)
    share = replicas_of("dip", first, NUM_REPLICAS)[0]
    choice = dip_choice(share)
    evidence.notes.append(
        f"{where}: {first.stages[0]} + {first.stages[1]}, Entrain {recomputed_s:.3f} s at batch 1; DIP in "
        f"{dip_windows(share)} windows, {choice.parts} sub-microbatches, recompute {choice.recompute}"
    )
    for subject in (name for name in ("entrain", OURS) if name in methods):
        for method, interval in speedups(methods, subject).items():
            if not method.startswith(OURS):
                evidence.ours[f"{key}/{subject}_over_{method}"] = interval.mean
                evidence.notes.append(f"{where}: {subject} over {method} {interval}")
    over = speedups(methods, "entrain")
    for method in (name for name in (*APART, *SHARED) if name in methods):
        evidence.claim(
            f"{where}: Entrain is not slower than {method} ({over[method]});",
            over[method].high >= 1,
            About.PAPER if method in PRINTED else About.METHODS,
            cause=why_slower(method, dataset, llm, study),
        )
    if OURS in methods:
        ours = speedups(methods, OURS)
        for method in (*APART, "exchanges", "dip", "entrain", "entrain-zb"):
            evidence.claim(
                f"{where}: {OURS} is faster than {method} ({ours[method]});",
                ours[method].low > 1,
                About.METHODS,
            )
    return evidence


def why_slower(method: str, dataset: str, llm: str, study: Study) -> str:
    """Why Entrain may be slower than a method: whole stages for a share of work that is none.

    A module whose stages are fewer than its share of all work takes longer than it would on ranks that do
    both modules' work.
    """
    first = batch(dataset, llm, 1, study)
    share = encoder_share(first)

    def more(stages: tuple[int, int]) -> str:
        return (
            f"{stages[0]} + {stages[1]} leave one module {excess(share, stages):.0%} more than an even share"
        )

    text = (
        f"the encoder has {BLOCKS * share:.2f} of {BLOCKS} stages' work by our costs: Entrain's "
        f"{more(first.stages)}"
    )
    if method == "optimus":
        return f"{text}; ranks of Optimus, a greedy bound that sends nothing, do both modules' work"
    if method in SHARED:
        return f"{text}; ranks of DIP do both modules' work"
    if method in OWN_STAGES and study.layouts is Layouts.PRINTED:
        return f"{text}, DistTrain's {more(printed_stages()[dataset, llm, 'disttrain'])}, both as printed"
    return text


def most_of(series_of: Series) -> float:
    """Entrain's largest speed-up over the paper's baselines."""
    return max(
        speedups(methods, "entrain")[method].mean
        for series in series_of.values()
        for methods in series.values()
        for method in (OWN, "dip")
    )


def drawing(series_of: Series) -> Grid:
    """Mean speed-up over plain 1F1B by method with its interval; Entrain and ours in colour."""
    rows = [
        [_panel(f"{dataset}, {llm}", methods) for dataset, methods in series.items()]
        for llm, series in series_of.items()
    ]
    return Grid(rows=rows, panel_inches=(4.0, 3.8), shares_y="all")


def _panel(title: str, methods: dict[str, Figures]) -> Bars:
    names = tuple(methods)
    over = [over_plain(methods, name) for name in names]
    means = [speedup.mean for speedup in over]
    errors = (
        [speedup.mean - speedup.low for speedup in over],
        [speedup.high - speedup.mean for speedup in over],
    )
    is_mine = [name.startswith("entrain") for name in names]
    colours = [GREEN if mine else LIGHT for mine in is_mine]
    labels = ["Entrain and ours" if mine else "others" for mine in is_mine]
    bars = Values(values=means, colour=colours, label=labels, errors=errors)
    return Bars(title=title, y="times as fast as 1F1B", names=names, series=[bars], level=1, slant=60)


def over_plain(methods: dict[str, Figures], name: str) -> Interval:
    """Plain 1F1B's time over a method's."""
    pairs = zip(methods["1f1b"]["seconds"], methods[name]["seconds"], strict=False)
    return bootstrap([plain / method_time for plain, method_time in pairs])


@script(profile="A40")
def run() -> Parts:
    """Evidence and drawings of all panels for which there is a series."""
    series_of = {study.name: kept_series(study) for study in (STUDY, STUDIES["printed"], STUDIES["charts"])}
    parts = [
        data_set_evidence(llm, dataset, methods, STUDIES[name])
        for name, study_series in series_of.items()
        for llm, series in study_series.items()
        for dataset, methods in series.items()
        if name != "charts"
    ]
    summary = Evidence()
    most = {
        "our stages": most_of(series_of["ours"]),
        "the printed stages": most_of(series_of["printed"]),
        "our stages, other charts": most_of(series_of["charts"]),
    }
    number = PaperNumber("modelled/most", 1.40, "times", "section 4.7", rel_tol=0.15)
    summary.add_range(number, most, "sizes of SynthChartNet's charts and tables")
    summary.figures["entrain_figure4_12"] = drawing(series_of["ours"])
    return [summary, *parts]
