"""Figures 8a and 8b: the policies of Table 3 at 32k and 16k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, appendix D, Figure 8.
Setup:   as Table 3, with 32k and 16k tokens.
Given:   as Table 3.
Differs: as Table 3. Shorter rows leave a launch fewer blocks than a GPU has units, so ours finds cutting rows
         worth more than printed, and balancing across GPUs alone neutral where it is printed as a loss.
Ours:    simulated on one CPU core, about 6 s.
"""

from experiments.cornstarch.attention_policies import (
    FOUR,
    PolicyTable,
    a40_testbed,
    policy_evidence,
    ratio_text,
)
from experiments.cornstarch_icml.table3 import LLMS, NO_GAIN, across_cause
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import printed_rows
from experiments.harness.script import Parts, script

PANELS = {"8a": 32768, "8b": 16384}
LENGTH_REL_TOL = 0.15


def panel_evidence(panel: str, table: PolicyTable) -> Evidence:
    """Evidence of one panel: its rows under separate keys, and who wins."""
    evidence = policy_evidence(f"cornstarch_icml_figure{panel}", f"Figure {panel}", table, mark=f"{panel}/")
    for llm in LLMS:
        across = table.gain(llm, "inter_gpu_only")
        both = table.gain(llm, "cornstarch")
        text = f"{panel} {llm}: across GPUs alone gains nothing (ours {across:.2f}x);"
        evidence.claim(text, across <= NO_GAIN, cause=across_cause(table, llm))
        evidence.claim(f"{panel} {llm}: both balances beat causal CP (ours {both:.2f}x);", both > 1)
    evidence.notes.append(f"{panel}: {ratio_text(table, LLMS)}")
    return evidence


def length_evidence(tables: dict[str, PolicyTable]) -> Evidence:
    """Time at 32k over time at 16k, per policy: 4 for pairs alone, less where tails count."""
    evidence = Evidence()
    printed = {
        (panel, row["llm"], row["policy"]): float(row["time_ms"])
        for panel in PANELS
        for row in printed_rows(f"cornstarch_icml_figure{panel}")
        if row["scope"] == "attn"
    }
    evidence.causes["modelled/*/32k_over_16k"] = (
        "balancing across GPUs is printed as a loss at 16k; ours is neutral"
    )
    for llm in LLMS:
        for policy in FOUR:
            long, short = (tables[panel].times(llm, "attn")[0][policy] for panel in PANELS)
            ratio = printed["8a", llm, policy] / printed["8b", llm, policy]
            key = f"modelled/{llm}/attn/{policy}/32k_over_16k"
            evidence.add(PaperNumber(key, ratio, "x", "Figure 8", LENGTH_REL_TOL), long / short)
    return evidence


@script(profile="A40")
def run() -> Parts:
    bed = a40_testbed()
    tables = {panel: PolicyTable(bed, num_tokens, FOUR) for panel, num_tokens in PANELS.items()}
    parts = [panel_evidence(panel, table) for panel, table in tables.items()]
    return [length_evidence(tables), *parts]  # its cause is the narrower
