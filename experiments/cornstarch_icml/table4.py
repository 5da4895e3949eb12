"""Table 4: lambda attention, Cornstarch against DCP, 32k to 256k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, section 5.5, Table 4.
Setup:   one attention layer on 16 A40; 64 sinks and a window of 4,096.
Given:   as `experiments.attention_dcp` says, and what differs likewise.
Ours:    simulated on one CPU core, about 5 s.
Run:     python -m experiments.cornstarch_icml.table4
"""

from experiments import paper
from experiments.attention_dcp import table_outcome
from experiments.paper import Outcome


def run() -> Outcome:
    """All evidence of the table."""
    return table_outcome(4, "lambda")


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
