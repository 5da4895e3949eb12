"""Figure 13: one encoder and the small LLM, three ways to place the encoder.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix B.2, Figure 13.
Setup:   stages of Table 5; otherwise, and for what is given, as in `experiments.cornstarch.end_to_end`.
Differs: neither the bars nor the text of this figure has numbers, so only who is ahead is checked.
Ours:    simulated on one CPU core, about a minute.
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [figure_evidence("Figure 13", "S", ("VLM", "ALM"), a40_cost())])
