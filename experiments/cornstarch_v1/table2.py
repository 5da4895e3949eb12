"""Table 2: modality parallelism against colocated encoders, medium LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 6.3, Table 2.
Setup:   and what is given, as `experiments.cornstarch.modality_tables` says.
Differs: the first row's modality-parallel throughput is lost in the text of the PDF; its ratio is not held
         against anything.
         Absolute throughputs are excluded by the stage times of Tables 3, 10 and 11.
Ours:    simulated on one CPU core, seconds.
"""

from experiments.cornstarch.modality_tables import modality_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [modality_evidence("M", a40_cost())])
