"""Table 10: shared-question attention, Cornstarch against DCP, 32k to 256k tokens.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, appendix F, Table 10.
Setup:   one attention layer on 16 A40; a question of a fifth and four answers.
Given:   as `experiments.attention_dcp` says, and what differs likewise.
Ours:    simulated on one CPU core, about 5 s.
Run:     python -m experiments.cornstarch_icml.table10
"""

from experiments import paper
from experiments.attention_dcp import table_outcome
from experiments.paper import Outcome


def run() -> Outcome:
    """All evidence of the table."""
    return table_outcome(10, "shared_questions")


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
