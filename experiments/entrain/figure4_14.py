"""Figures 4.14 and C.1 to C.7: memory of every rank under DistTrain, DIP and Entrain.

Paper:   I. Jang, dissertation, section 4.7.2, Figure 4.14; appendix C.4.
Setup:   one replica of 16 A40s, tp 2, 128 samples in 32 microbatches, stages of the data set's mean ratio;
         DIP has 8 stages of either module on the same ranks.
Given:   "about 12 GB" more under DIP on rank 7; curves are not printed.
Differs: sizes are ours; DistTrain has Entrain's stages. Under DIP a rank keeps encoder activations of all 32
         microbatches, so its peak grows with the batch; whether that fits decides if it can run at all.
Ours:    simulated with the memory of every action, about 5 s a data set.
Run:     python -m experiments.entrain.figure4_14 [--json]
"""

from collections.abc import Mapping

from experiments import paper
from experiments.entrain.series import stable_stages
from experiments.entrain.workload import CORPUS_OF, LLM_OF, batch_of, cost_model, job_of
from experiments.evidence import Evidence, outcome_of
from experiments.modelled import A40
from experiments.paper import Outcome, PaperNumber
from sim.engine import simulate
from workbench.metrics import peak_bytes
from workbench.plan.lower import lower
from workbench.plan.memory import memory_table
from workbench.plan.price import price
from workbench.search.drive import Planner
from workbench.strategies import cornstarch, dip, entrain, reordered
from workbench.strategies.stage_counts import silent
from workbench.units import GB

PLANNERS: Mapping[str, Planner] = {
    "1f1b": cornstarch.plan,
    "disttrain": reordered.plan,
    "dip": dip.plan,
    "entrain": entrain.plan,
}
NUM_SAMPLES, SEED = 128, 1
RANK = 7  # the text's


def peaks_gb(dataset: str, llm: str, system: str) -> list[float]:
    """Most that each rank holds over a step."""
    batch = batch_of(dataset, NUM_SAMPLES, SEED)
    stages = None if system == "dip" else stable_stages(dataset, llm)
    lowered = lower(PLANNERS[system](job_of(dataset, llm, batch, pp=stages), cost_model(), silent))
    prices = price(lowered, cost_model())
    trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory_table(lowered))
    return [held / GB for _, held in sorted(peak_bytes(trace).items())]


def panel_evidence(dataset: str, llm: str) -> Evidence:
    """One panel: peaks by system."""
    evidence = Evidence()
    found = {system: peaks_gb(dataset, llm, system) for system in PLANNERS}
    where, key = f"{dataset}, {llm}", f"modelled/{llm}/{dataset}"
    for system, held_gb in found.items():
        evidence.ours[f"{key}/{system}_peak_gb"] = max(held_gb)
        listed = " ".join(f"{each:.1f}" for each in held_gb)
        evidence.notes.append(f"{where}, {system}: GB by rank {listed}")
    most = {system: max(held_gb) for system, held_gb in found.items()}
    evidence.claim(
        f"{where}: DIP needs most ({most['dip']:.1f} GB, Entrain {most['entrain']:.1f});",
        most["dip"] == max(most.values()),
    )
    evidence.claim(
        f"{where}: deferral costs <= 10 % over 1F1B ({most['entrain']:.1f}, {most['1f1b']:.1f} GB);",
        most["entrain"] <= 1.1 * most["1f1b"],
    )
    evidence.claim(
        f"{where}: Entrain's peak is not above DistTrain's ({most['disttrain']:.1f} GB);",
        most["entrain"] <= most["disttrain"],
    )
    if (dataset, llm) == ("SynthChartNet", "Llama3-3b"):
        number = PaperNumber("modelled/dip_more_gb", 12, "GB", "section 4.7.2", rel_tol=0.25)
        evidence.add(number, found["dip"][RANK] - found["entrain"][RANK])
    return evidence


def run() -> Outcome:
    """All eight panels."""
    parts = [panel_evidence(dataset, llm) for llm in LLM_OF for dataset in CORPUS_OF]
    return outcome_of("entrain/figure4_14", parts, profile=A40)


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
