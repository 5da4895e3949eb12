"""Table 2: modality parallelism against colocated encoders, medium LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 6.3, Table 2.
Setup:   as in `experiments.cornstarch.modality_tables`, also for what is given.
Differs: the first row's modality-parallel throughput is lost in the text of the PDF, so its ratio is not
         compared.
         The stage times of Tables 3, 10 and 11 rule out the absolute throughputs.
Ours:    simulated on one CPU core, seconds.
"""

from experiments.cornstarch.modality_tables import modality_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [modality_evidence("M", a40_cost())])
