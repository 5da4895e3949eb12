"""Table 9: causal blockwise attention, Cornstarch against DCP, 32k to 256k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, appendix F, Table 9.
Setup:   one attention layer on 16 A40; blocks of 256, two at a time, and a last one that sees all.
Given:   as `experiments.attention_dcp` says, and what differs likewise.
Ours:    simulated on one CPU core, about 5 s.
Run:     python -m experiments.cornstarch_icml.table9
"""

from experiments import paper
from experiments.attention_dcp import table_outcome
from experiments.paper import Outcome


def run() -> Outcome:
    """All evidence of the table."""
    return table_outcome(9, "causal_blockwise")


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
