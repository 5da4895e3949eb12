"""Figure 13: one encoder and the small LLM, three ways to place the encoder.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix B.2, Figure 13.
Setup:   stages of Table 5; else, and what is given, as `experiments.cornstarch.end_to_end` says.
Differs: neither the bars nor the text of this figure has numbers; judged is who is ahead.
Ours:    simulated on one CPU core, about a minute.
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [figure_evidence("Figure 13", "S", ("VLM", "ALM"), a40_cost())])
