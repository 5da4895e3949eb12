"""Table 1: layers, width and parameters of the nine models.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, Table 1.
Given:   as in `experiments.cornstarch.model_sizes`.
Differs: a count must match within 2 % or within half a unit of its last printed digit. The printed 8b and 18b
         of EVA-CLIP are those of the whole models with their text towers; the vision towers have 7.5 and
         17.6.
Ours:    computed, no simulation.
"""

from experiments.cornstarch.model_sizes import size_evidence
from experiments.harness.script import script

run = script()(lambda: [size_evidence("cornstarch_v1_table1")])
