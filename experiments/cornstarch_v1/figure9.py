"""Figure 9: one encoder and the medium LLM, three ways to place the encoder.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 6.2.1, Figure 9.
Setup:   stages of Table 5; otherwise, and for what is given, as in `experiments.cornstarch.end_to_end`.
Differs: the bars have no numbers in the text, so only the text's claims are checked.
Ours:    simulated on one CPU core, about a minute.
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import a40_cost
from experiments.harness.script import script

run = script(profile="A40")(lambda: [figure_evidence("Figure 9", "M", ("VLM", "ALM"), a40_cost())])
