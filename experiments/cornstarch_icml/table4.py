"""Table 4: lambda attention, Cornstarch against DCP, 32k to 256k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, section 5.5, Table 4.
Setup:   one attention layer on 16 A40; 64 sinks and a window of 4,096.
Given:   as `experiments.cornstarch.attention_dcp` says, and what differs likewise.
Ours:    simulated on one CPU core, about 5 s.
Run:     python -m experiments.cornstarch_icml.table4
"""

from experiments.cornstarch.attention_dcp import table_evidence
from experiments.cornstarch.modelled import A40
from experiments.harness.script import main, script

run = script(profile=A40)(lambda: table_evidence(4, "lambda"))

if __name__ == "__main__":
    main(run)
