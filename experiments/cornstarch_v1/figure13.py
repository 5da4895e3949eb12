"""Figure 13: one encoder and the small LLM, three ways to place the encoder.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix B.2, Figure 13.
Setup:   A40 GPUs, 24 microbatches of one sample (1k text tokens, one 1280x720 image or a 30 s clip),
         encoders and LLM frozen, projectors trained, activation checkpointing;
         stages, TP 2 and CP 2 of Table 5.
Given:   printed stage counts and model sizes; 6 stages for replicated encoders -> throughput per GPU of the
         simulated plans with the A40 profile.
Differs: neither the bars nor the text of this figure has numbers; judged is who is ahead.
Ours:    simulated on one CPU core, about a minute.
Run:     python -m experiments.cornstarch_v1.figure13
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import A40
from experiments.harness.script import Parts, main, script
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@script(profile=A40)
def run() -> Parts:
    """All models of the figure."""
    evidence = figure_evidence("Figure 13", ("S",), ("VLM", "ALM"), CostModel(load_profile(A40)))
    return [evidence]


if __name__ == "__main__":
    main(run)
