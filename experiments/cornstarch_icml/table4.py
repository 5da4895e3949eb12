"""Table 4: lambda attention, Cornstarch against DCP, 32k to 256k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, section 5.5, Table 4.
Setup:   one attention layer on 16 A40; 64 sinks and a window of 4,096.
Given:   as in `experiments.cornstarch.attention_dcp`, with the same differences.
Ours:    simulated on one CPU core, about 5 s.
"""

from experiments.cornstarch.attention_dcp import table_evidence
from experiments.harness.script import script

run = script(profile="A40")(lambda: table_evidence(4, "lambda"))
