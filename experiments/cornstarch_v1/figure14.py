"""Figure 14: one encoder and the large LLM, three ways to place the encoder.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix B.2, Figure 14.
Setup:   stages of Table 5; otherwise, and for what is given, as in `experiments.cornstarch.end_to_end`.
Differs: neither the bars nor the text of this figure has numbers, so only who is ahead is checked.
Ours:    simulated on one CPU core, some minutes.
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [figure_evidence("Figure 14", "L", ("VLM", "ALM"), a40_cost())])
