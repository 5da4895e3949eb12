"""Figure 9: share of busy compute units with several streams, three sizes of LLM.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, appendix E, Figure 9.
Setup:   as Table 7, 64k tokens; a line per GPU.
Given:   as Table 7: starts and ends of all blocks on the 84 units of each of 8 GPUs, two launches at a time.
Differs: the plot has no numbers, so only the text's claims are checked: heads overlap inside a layer, the end
         of the layer has nothing to overlap with.
Ours:    simulated on one CPU core, about 1 s.
"""

import numpy as np

from experiments.cornstarch.attention_policies import MAIN, a40_testbed, llm_of, run_policy
from experiments.cornstarch_icml.figure6 import DIP, NUM_TOKENS, busiest
from experiments.cornstarch_icml.table3 import LLMS
from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from sim.attention.policies import AttentionRun

NUM_BINS = 400


def dips(run: AttentionRun) -> tuple[float, float]:
    """Parts of the layer below half activity on the busiest GPU: before its last launch begins, and after."""
    rank = busiest(run)
    edges = np.linspace(run.gathers_s[0][1], run.rank_s[rank], NUM_BINS + 1)
    low = run.activity(rank, edges) < DIP
    before = edges[1:] <= run.launches[rank][-1].first_s
    return float((low & before).mean()), float((low & ~before).mean())


@script(profile="A40")
def run() -> Evidence:
    """Evidence: dips inside and at the end of the layer, by LLM."""
    evidence = Evidence()
    bed = a40_testbed()
    for llm in LLMS:
        module = llm_of(llm)
        inside, end = dips(run_policy(bed, module, NUM_TOKENS, MAIN, "inter_gpu_multistreams"))
        alone, _ = dips(run_policy(bed, module, NUM_TOKENS, MAIN, "inter_gpu_only"))
        evidence.ours[f"modelled/{llm}/dips_inside"] = inside
        evidence.ours[f"modelled/{llm}/dips_at_end"] = end
        evidence.ours[f"modelled/{llm}/dips_inside_one_stream"] = alone
        text = f"{llm}: streams fill the dips between heads (ours {alone:.0%} to {inside:.0%} of the layer);"
        evidence.claim(text, inside < alone)
        evidence.claim(f"{llm}: the dip at the end of the layer stays (ours {end:.1%});", end > 0)
    return evidence
