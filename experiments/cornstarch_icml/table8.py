"""Table 8: causal attention, Cornstarch against DCP, 32k to 256k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, appendix F, Table 8.
Setup:   one attention layer on 16 A40; every token attends to the tokens before it.
Given:   as in `experiments.cornstarch.attention_dcp`, with the same differences.
Ours:    simulated on one CPU core, about 5 s.
"""

from experiments.cornstarch.attention_dcp import table_evidence
from experiments.harness.script import script

run = script(profile="A40")(lambda: table_evidence(8, "causal"))
