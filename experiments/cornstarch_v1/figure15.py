"""Figure 15: two encoders and the small or large LLM, three ways to place the encoders.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix B.3, Figure 15.
Setup:   stages of Table 6; otherwise, and for what is given, as in `experiments.cornstarch.end_to_end`.
Differs: neither the bars nor the text of this figure has numbers, so only who is ahead is checked.
Ours:    simulated on one CPU core, some minutes.
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [figure_evidence("Figure 15", "SL", ("VALM",), a40_cost())])
