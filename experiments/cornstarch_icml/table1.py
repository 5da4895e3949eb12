"""Table 1: layers, width and parameters of the nine models.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, Table 1.
Given:   as in `experiments.cornstarch.model_sizes`.
Differs: a count must match within 2 % or within half a unit of its last printed digit: "1b" says no more.
         Phi-4's audio encoder has 0.44e9 parameters, printed as 0.5; its own report gives 0.46 with
         projector.
Ours:    computed, no simulation.
"""

from experiments.cornstarch.model_sizes import size_evidence
from experiments.harness.script import script

run = script()(lambda: [size_evidence("cornstarch_icml_table1")])
