"""Figure 4.6: idle share of pipelines under existing systems, compared with perfectly even work.

Paper:   I. Jang, dissertation, section 4.2.2, Figure 4.6: four data sets, 100 iterations, 4 stages,
         16 microbatches. "Imbalance-driven bubbles compound the irreducible data-dependency bubbles."
Setup:   one replica of 4 stages of tp 2 on A40s, four samples a microbatch, Llama 3.2 1B; stages of the data
         set's mean ratio where modules are apart.
Given:   that every system has more bubbles than the ideal; no figures are printed, nor the model.
Differs: sizes of samples are ours. The ideal is that of each system's own pipeline with even work. Modules
         apart: 1F1B of p equal stages and m equal microbatches, idle for (p - 1) / (m + p - 1), which the
         paper draws for all. Colocated, an encoder's warm-up is of one sub-microbatch and of a stage that
         shares ranks with the LLM's, so DIP's ideal is lower; Optimus fills what the LLM's pipeline leaves.
         Work is that of all samples and of one call a microbatch and stage.
Ours:    pipelines without messages, as in Figure 4.12; about 20 s.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace

from experiments.entrain.methods import METHODS, dip_choice
from experiments.entrain.replica import Replica
from experiments.entrain.series import stable_stages
from experiments.entrain.stage_work import StageWork, Which
from experiments.entrain.workload import CORPUS_OF, batch_of
from experiments.harness.figure import Grid, Spreads
from experiments.harness.outcome import Evidence
from experiments.harness.script import Parts, script
from workbench.float_sum import float_sum

LLM = "Llama3-1b"
STAGES, MICROBATCHES, BATCHES = 4, 16, 100
EXISTING, OURS = ("1f1b", "disttrain", "optimus", "dip"), ("entrain",)
SEEN = 0  # the seed of the batch that DIP sees before
IDLE_OF_EVEN_WORK = (STAGES - 1) / (MICROBATCHES + STAGES - 1)


def drawn(dataset: str, seed: int) -> Replica:
    """A replica with the samples of one iteration."""
    replica = Replica(llm=LLM, samples=(), stages=stable_stages(dataset, LLM, STAGES))
    samples, seen = (batch_of(dataset, MICROBATCHES * replica.microbatch_samples, s) for s in (seed, SEEN))
    return replace(replica, samples=samples, seen=seen)


def busy_s(replica: Replica) -> float:
    """Seconds of all passes on all stages, one call a microbatch and stage."""
    return float_sum(_module_s(replica, work) for work in (replica.encoder_work(), replica.llm_work()))


def _module_s(replica: Replica, work: StageWork) -> float:
    chunks = replica.chunks(range(len(replica.samples)))
    passes = (Which.FORWARD, Which.BACKWARD)
    return float_sum(float(work.microbatches_s(which, chunks).sum()) for which in passes)


def ideal_idle(method: str, replica: Replica) -> float:
    """Idle share of a method's pipeline if all samples had the mean size.

    With E and L seconds of encoder and LLM a microbatch on each of p shared ranks, DIP idles for p - 1 stages
    of the LLM and of one of q sub-microbatches of the encoder; Optimus until the LLM's pipeline is through,
    or not at all.
    """
    if method not in ("dip", "optimus"):
        return IDLE_OF_EVEN_WORK
    works = (replica.encoder_work(1), replica.llm_work(1))
    encoder_s, llm_s = (_module_s(replica, work) / MICROBATCHES / STAGES for work in works)
    busy = MICROBATCHES * (encoder_s + llm_s)
    if method == "optimus":
        return max(0.0, 1 - busy / ((MICROBATCHES + STAGES - 1) * llm_s))
    waiting = (STAGES - 1) * (llm_s + encoder_s / dip_choice(replica).parts)
    return waiting / (busy + waiting)


def idle_shares(dataset: str, num_batches: int = BATCHES) -> dict[str, list[float]]:
    """Method -> idle share of the ranks' time, batch by batch."""
    replicas = [drawn(dataset, seed) for seed in range(1, num_batches + 1)]
    return {
        method: [
            1 - busy_s(replica) / (STAGES * METHODS[method](replica).iteration_s) for replica in replicas
        ]
        for method in (*EXISTING, *OURS)
    }


def evidence_of(dataset: str, shares_of: Mapping[str, list[float]]) -> Evidence:
    """Evidence on every system's mean idle share, and whether existing ones are above the ideal."""
    evidence = Evidence()
    for method, shares in shares_of.items():
        mean, spread = statistics.fmean(shares), statistics.stdev(shares)
        evidence.ours[f"modelled/{dataset}/{method}_idle"] = mean
        evidence.notes.append(f"{dataset}, {method}: idle {mean:.3f}, deviation {spread:.3f}")
    for method in EXISTING:
        mean, ideal = statistics.fmean(shares_of[method]), ideal_idle(method, drawn(dataset, 1))
        evidence.ours[f"modelled/{dataset}/{method}_ideal"] = ideal
        evidence.claim(
            f"{dataset}: {method} idles more than with even work ({mean:.3f}, {ideal:.3f});", mean > ideal
        )
    return evidence


def drawing(shares_of_data_set: Mapping[str, Mapping[str, list[float]]]) -> Grid:
    """Box plots over batches, one panel per data set; the line is the ideal of modules apart."""
    panels = [
        Spreads(
            title=dataset,
            y="idle share of the ranks' time",
            y_limits=(0, None),
            level=IDLE_OF_EVEN_WORK,
            slant=30,
            values=shares_of,
        )
        for dataset, shares_of in shares_of_data_set.items()
    ]
    title = f"{STAGES} stages, {MICROBATCHES} microbatches, {BATCHES} batches; dashed: even work, apart"
    return Grid(rows=[panels], title=title, panel_inches=(3.3, 3.2), shares_y="all")


@script(profile="A40")
def run() -> Parts:
    shares_of_data_set = {dataset: idle_shares(dataset) for dataset in CORPUS_OF}
    parts = [evidence_of(dataset, shares_of) for dataset, shares_of in shares_of_data_set.items()]
    parts[0].figures["entrain_figure4_6"] = drawing(shares_of_data_set)
    return parts
