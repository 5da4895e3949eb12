"""Figure 10: two encoders and the medium LLM, three ways to place the encoders.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 6.2.2, Figure 10.
Setup:   stages of Table 6; otherwise, and for what is given, as in `experiments.cornstarch.end_to_end`.
Differs: the bars have no numbers in the text, so only the text's claims are checked.
Ours:    simulated on one CPU core, some minutes.
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [figure_evidence("Figure 10", "M", ("VALM",), a40_cost())])
