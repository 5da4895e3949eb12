"""Table 3: frozen-aware against frozen-unaware partitioning, medium LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 6.4, Table 3, configurations of Table 9.
Setup:   as in `experiments.cornstarch.frozen_tables`, also for what is given.
Differs: Table 9 gives VLM-S 3 LLM stages without and 6 with frozen awareness, yet stages of both take the
         same time; the backward times imply 5 and 6. They contradict 8 of the 12 LLM stage counts.
         Section 6.4 adds the LLM's forward (67.03 ms) to the encoder's, 137.45 ms, instead of its backward.
         Printed throughputs are about 8 times what the stage times give with tensor parallelism 2; see
         experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
"""

from experiments.cornstarch.frozen_tables import prose_evidence, table_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import Parts, script


@script(profile="A40")
def run() -> Parts:
    printed, itself, own_model = table_evidence("M", a40_cost())
    return [printed, itself, prose_evidence(), own_model]
