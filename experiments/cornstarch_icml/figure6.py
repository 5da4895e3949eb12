"""Figure 6: share of busy compute units over one attention layer, four policies, the large LLM.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, section 5.4, Figure 6.
Setup:   as Table 3, LLM-L, 64k tokens; a line per GPU.
Given:   as Table 3: starts and ends of all blocks on the 84 units of each of 8 GPUs.
Differs: the plot has no numbers, so only the text's claims are checked: a dip at the end of every head where
         rows are whole, hardly any where they are cut; GPUs that run out of work early unless tokens are
         balanced across them. A unit that merges counts as busy.
Ours:    simulated on one CPU core, about 1 s.
"""

from collections.abc import Mapping
from statistics import fmean

import numpy as np

from experiments.cornstarch.attention_policies import FOUR, MAIN, a40_testbed, llm_of, run_policy
from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from sim.attention.policies import AttentionRun

LLM = "LLM-L"
NUM_TOKENS = 65536
NUM_BINS = 200
DIP = 0.5  # share of busy units
FEW = 0.05  # of a launch
SPREAD = 1.05  # busiest GPU over the mean


def busiest(run: AttentionRun) -> int:
    """The rank with the most work."""
    return max(range(len(run.launches)), key=lambda rank: run.busy_share[rank])


def tail_share(run: AttentionRun) -> float:
    """Mean share of the busiest GPU's launches in which less than half of its units are busy."""
    rank = busiest(run)
    shares = []
    for launch in run.launches[rank]:
        edges = np.linspace(launch.first_s, launch.end_s, NUM_BINS + 1)
        shares.append(float((run.activity(rank, edges) < DIP).mean()))
    return fmean(shares)


def work_spread(run: AttentionRun) -> float:
    """Work of the busiest GPU over the mean."""
    return max(run.busy_share) / fmean(run.busy_share)


def claims(evidence: Evidence, tails: Mapping[str, float], spreads: Mapping[str, float]) -> None:
    """Claims of section 5.4 on the four panels."""
    for policy in ("causal_cp", "inter_gpu_only"):
        text = f"{policy}: a dip ends every head (ours {tails[policy]:.0%} of a head below half);"
        evidence.claim(text, tails[policy] > FEW)
    for policy in ("intra_gpu_only", "cornstarch"):
        text = f"{policy}: dips are gone (ours {tails[policy]:.0%} of a head below half);"
        evidence.claim(text, tails[policy] <= FEW)
    for policy in ("causal_cp", "intra_gpu_only"):
        text = f"{policy}: some GPUs run dry early (busiest {spreads[policy]:.2f} of the mean);"
        evidence.claim(text, spreads[policy] > SPREAD)
    for policy in ("inter_gpu_only", "cornstarch"):
        text = f"{policy}: GPUs have the same work (busiest {spreads[policy]:.2f} of the mean);"
        evidence.claim(text, spreads[policy] <= SPREAD)


@script(profile="A40")
def run() -> Evidence:
    """Evidence: activity of every GPU over time, dips and spread."""
    evidence = Evidence()
    bed, llm = a40_testbed(), llm_of(LLM)
    runs = {policy: run_policy(bed, llm, NUM_TOKENS, MAIN, policy) for policy in FOUR}
    tails = {policy: tail_share(run) for policy, run in runs.items()}
    spreads = {policy: work_spread(run) for policy, run in runs.items()}
    for policy, run in runs.items():
        evidence.ours[f"modelled/{policy}/seconds_ms"] = 1e3 * run.makespan_s
        evidence.ours[f"modelled/{policy}/dip_share"] = tails[policy]
        evidence.ours[f"modelled/{policy}/busiest_over_mean"] = spreads[policy]
        evidence.ours[f"modelled/{policy}/activity"] = fmean(run.busy_share)
    claims(evidence, tails, spreads)
    highest = max(runs, key=lambda policy: fmean(runs[policy].busy_share))
    evidence.claim(f"activity is highest with both balances (ours: {highest});", highest == "cornstarch")
    evidence.notes.append(
        "mean activity: " + ", ".join(f"{policy} {fmean(run.busy_share):.2f}" for policy, run in runs.items())
    )
    return evidence
