"""Tables 4.1 and C.1: pipeline depths that each system derives for encoder and LLM.

Paper:   I. Jang, dissertation, section 4.7.1, Table 4.1; appendix C.3, Table C.1.
Setup:   a replica of 16 GPUs at tp 2; DistTrain profiles 1 sample, DIP 4, Entrain 256; 59 random draws.
Given:   sizes profiled. DIP colocates, so that its 8 and 8 follow from 16 GPUs at tp 2.
Differs: sizes of samples and layer times are ours, so no allocation is expected to match; printed cells are
         shown with the frequency of ours. Checked: one sample leaves the depths to chance where sizes vary,
         256 do not.
Ours:    20,000 samples a data set through our cost model of an A40; about 10 s.
"""

from collections import Counter

from experiments.entrain.replica import BLOCKS
from experiments.entrain.series import printed_stages
from experiments.entrain.workload import PANELS, batch_draws
from experiments.harness.outcome import Evidence
from experiments.harness.script import Parts, script
from workbench.balance.orchestration.allocation import Allocation, num_trials, proportional_allocation

PROFILED = {"disttrain": 1, "entrain": 256}


def derived(dataset: str, llm: str, num_samples: int) -> Counter[Allocation]:
    """Counts of allocations over random draws of `num_samples` samples."""
    draw = batch_draws(dataset, llm, 0)
    draws = range(num_trials(0.95, 0.05))
    return Counter(proportional_allocation(draw(num_samples), BLOCKS) for _ in draws)


def pair_evidence(dataset: str, llm: str) -> Evidence:
    """Evidence of one column of a table for one model."""
    evidence, cells = Evidence(), printed_stages()
    counts_of = {system: derived(dataset, llm, size) for system, size in PROFILED.items()}
    where, key = f"{dataset}, {llm}", f"modelled/{llm}/{dataset}"
    for system, counts in counts_of.items():
        encoder, text = counts.most_common(1)[0][0]
        evidence.ours |= {
            f"{key}/{system}_encoder_pp": encoder,
            f"{key}/{system}_llm_pp": text,
            f"{key}/{system}_allocations": len(counts),
        }
        listed = ", ".join(f"{e}+{t} x{n}" for (e, t), n in counts.most_common())
        paper_cell = "+".join(map(str, cells[dataset, llm, system]))
        evidence.notes.append(
            f"{where}, {system} ({PROFILED[system]} samples): {listed} (paper {paper_cell})"
        )
    steady, chance = counts_of["entrain"], counts_of["disttrain"]
    evidence.claim(
        f"{where}: 256 samples give no more allocations than one ({len(steady)}, {len(chance)});",
        len(steady) <= len(chance),
    )
    evidence.claim(f"{where}: 256 samples give one allocation ({len(steady)});", len(steady) == 1)
    return evidence


@script(profile="A40")
def run() -> Parts:
    setup = Evidence()
    dip = {cell for (_, _, system), cell in printed_stages().items() if system == "dip"}
    setup.claim(
        f"DIP's printed depths are those of 16 GPUs at tp 2, colocated ({BLOCKS});", dip == {(BLOCKS, BLOCKS)}
    )
    parts = [pair_evidence(dataset, llm) for llm, dataset in PANELS]
    return [setup, *parts]
