"""Table 7: several streams instead of cutting rows, 64k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, appendix E, Table 7.
Setup:   as Table 3; tokens balanced across GPUs, heads on several streams.
Given:   as Table 3; two launches side by side, each waiting for its own keys and values.
Differs: as Table 3; the number of streams is not printed (shown: 2). In ours a unit that runs out of blocks
         of one launch takes the next launch's at once, so all tails but the last vanish and streams win over
         cutting rows, which pays for pieces, partial results and merging. The paper prints the reverse: what
         prevents concurrent launches on the authors' GPUs is not in the model.
Ours:    simulated on one CPU core, about 6 s.
"""

from experiments.cornstarch.attention_policies import (
    BASELINE,
    UNSTATED,
    PolicyTable,
    a40_testbed,
    policy_evidence,
)
from experiments.cornstarch_icml.table3 import LLMS, NUM_TOKENS
from experiments.harness.causes import open_cause
from experiments.harness.outcome import Evidence
from experiments.harness.script import Parts, script

CONCURRENT = (
    "in ours a unit without blocks of one launch takes the other's at once, so that streams leave no tail "
    "but the last, and pieces of rows cost their merging. Of cutting over streams, "
)
SHOWN = (BASELINE, "inter_gpu_multistreams", "cornstarch")


def claims_evidence(table: PolicyTable) -> Evidence:
    """What appendix E says about streams."""
    evidence = Evidence()
    for llm in LLMS:
        streams, cut = (table.gain(llm, policy, "model") for policy in SHOWN[1:])
        evidence.claim(f"{llm}: streams beat causal CP (ours {streams:.2f}x);", streams > 1)
        evidence.claim(
            f"{llm}: cutting rows beats streams (ours {cut:.2f}x, {streams:.2f}x);",
            cut > streams,
            cause=CONCURRENT
            + open_cause(table.gains(llm, "cornstarch", "model", SHOWN[1]), lambda gain: gain > 1, UNSTATED),
        )
    return evidence


@script(profile="A40")
def run() -> Parts:
    table = PolicyTable(a40_testbed(), NUM_TOKENS, SHOWN)
    evidence = policy_evidence("cornstarch_icml_table7", "Table 7", table, scope="model")
    return [evidence, claims_evidence(table)]
