"""Table 10: frozen-aware against frozen-unaware partitioning, small LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix D.2, Table 10, configurations of Table 9.
Setup:   as in `experiments.cornstarch.frozen_tables`, also for what is given.
Differs: in print frozen-aware VLM-S and VLM-L are slower, as they are in the simulator.
         Printed throughputs are about 7 times what the stage times give with tensor parallelism 2; see
         experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
"""

from experiments.cornstarch.frozen_tables import table_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: table_evidence("S", a40_cost()))
