"""Figure 15: two encoders and the small or large LLM, three ways to place the encoders.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix B.3, Figure 15.
Setup:   stages of Table 6; else, and what is given, as `experiments.cornstarch.end_to_end` says.
Differs: neither the bars nor the text of this figure has numbers; judged is who is ahead.
Ours:    simulated on one CPU core, some minutes.
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [figure_evidence("Figure 15", "SL", ("VALM",), a40_cost())])
