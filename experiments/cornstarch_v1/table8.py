"""Table 8: modality parallelism against colocated encoders, large LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix C, Table 8.
Setup:   as in `experiments.cornstarch.modality_tables`, also for what is given.
Differs: VALM-ML prints 6+1 colocated stages where Table 6 has 4+3, and throughputs a third below its
         neighbours; our model gives its ratio, not its absolute drop.
         The stage times of Tables 3, 10 and 11 rule out the absolute throughputs.
Ours:    simulated on one CPU core, seconds.
"""

from experiments.cornstarch.modality_tables import layout_evidence, modality_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [modality_evidence("L", a40_cost()), layout_evidence("L")])
