"""Table 9: causal blockwise attention, Cornstarch against DCP, 32k to 256k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, appendix F, Table 9.
Setup:   one attention layer on 16 A40; blocks of 256, two at a time, and a last one that sees all.
Given:   mask -> tiles -> owners by LPT, rows cut, keys and values gathered head by head (Cornstarch); the
         same tiles placed to move few keys and values, sent point to point in 4 divisions (DCP).
Differs: heads, the pattern's parameters, the kernel's rate and what DCP's GPUs share are not printed. Shown:
         32 heads over 8 key-value heads of 128, DCP's own parameters, the profile's rate, an adaptor shared
         by the 4 GPUs of a node. DCP's search and its division into steps are simplified, see
         `workbench.balance.block_placement`.
         Printed times hardly depend on the pattern: at 256k Cornstarch's three masks besides causal take
         0.84 to 1.00 of causal's, though blocks have a 200th of its pairs. And 32k takes longer than
         64k in all four tables. Neither follows from masks, tiles or messages.
Ours:    simulated on one CPU core, about 5 s.
Run:     python -m experiments.cornstarch_icml.table9
"""

from experiments import paper
from experiments.attention_dcp import layer_evidence, oddity_evidence
from experiments.attention_policies import a40_testbed
from experiments.evidence import outcome_of
from experiments.modelled import A40
from experiments.paper import Outcome

PATTERN = "causal_blockwise"


def run() -> Outcome:
    """All evidence of the table."""
    bed = a40_testbed()
    table, where = "cornstarch_icml_table9", "Table 9"
    parts = [layer_evidence(bed, PATTERN, table, where), oddity_evidence(bed, PATTERN, table, where)]
    return outcome_of("cornstarch_icml/table9", parts, profile=A40)


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
