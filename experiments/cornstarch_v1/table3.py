"""Table 3: frozen-aware against frozen-unaware partitioning, medium LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 6.4, Table 3, configurations of Table 9.
Setup:   A40 GPUs, 24 microbatches of one sample (1k text tokens, one 1280x720 image or a 30 s clip),
         tensor parallelism of Table 9, activation checkpointing, encoder and LLM frozen.
Given:   printed stage times -> simulated throughput per GPU and gains ([printed]), once with the stage
         counts of Table 9 ("stated"), once with those that the stage times imply ("implied").
Differs: Table 9 gives VLM-S 3 LLM stages without and 6 with frozen awareness, yet stages of both take the
         same time; the backward times imply 5 and 6. They contradict 8 of the 12 LLM stage counts.
         Section 6.4 adds the LLM's forward (67.03 ms) to the encoder's, 137.45 ms, instead of its backward.
         Printed throughputs are about 8 times what the stage times give with tensor parallelism 2; see
         experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
Run:     python -m experiments.cornstarch_v1.table3
"""

from experiments.cornstarch.frozen_tables import (
    itself_evidence,
    own_evidence,
    printed_evidence,
    prose_evidence,
)
from experiments.cornstarch.modelled import A40
from experiments.harness.script import Parts, main, script
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@script(profile=A40)
def run() -> Parts:
    """All evidence of the table."""
    own = own_evidence("M", CostModel(load_profile(A40)))
    return [printed_evidence("M"), itself_evidence("M"), prose_evidence(), own]


if __name__ == "__main__":
    main(run)
