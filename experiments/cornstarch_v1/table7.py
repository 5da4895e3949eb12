"""Table 7: modality parallelism against colocated encoders, small LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix C, Table 7.
Setup:   as in `experiments.cornstarch.modality_tables`, also for what is given.
Differs: Table 6, whose stages these are, states TP 2 and CP 2, which takes more GPUs than there are.
         The stage times of Tables 3, 10 and 11 rule out the absolute throughputs.
Ours:    simulated on one CPU core, seconds.
"""

from experiments.cornstarch.modality_tables import layout_evidence, modality_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [modality_evidence("S", a40_cost()), layout_evidence("S")])
