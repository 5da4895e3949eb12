"""Table 11: frozen-aware against frozen-unaware partitioning, large LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix D.2, Table 11, configurations of Table 9.
Setup:   as in `experiments.cornstarch.frozen_tables`, also for what is given.
Differs: in print frozen-aware VLM-L and ALM-S are slower.
         Printed throughputs are about 18 times what the stage times give with tensor parallelism 4; see
         experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
"""

from experiments.cornstarch.frozen_tables import table_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: table_evidence("L", a40_cost()))
