"""Table 10: frozen-aware against frozen-unaware partitioning, small LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix D.2, Table 10, configurations of Table 9.
Setup:   A40 GPUs, 24 microbatches of one sample (1k text tokens, one 1280x720 image or a 30 s clip),
         tensor parallelism of Table 9, activation checkpointing, encoder and LLM frozen.
Given:   printed stage times -> simulated throughput per GPU and gains ([printed]), once with the stage
         counts of Table 9 ("stated"), once with those that the stage times imply ("implied").
Differs: frozen-aware VLM-S and VLM-L lose in print, and lose in the simulator too.
         Printed throughputs are about 7 times what the stage times give with tensor parallelism 2; see
         experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
Run:     python -m experiments.cornstarch_v1.table10
"""

from experiments.cornstarch.frozen_tables import itself_evidence, own_evidence, printed_evidence
from experiments.cornstarch.modelled import A40
from experiments.harness.script import Parts, main, script
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@script(profile=A40)
def run() -> Parts:
    """All evidence of the table."""
    own = own_evidence("S", CostModel(load_profile(A40)))
    return [printed_evidence("S"), itself_evidence("S"), own]


if __name__ == "__main__":
    main(run)
