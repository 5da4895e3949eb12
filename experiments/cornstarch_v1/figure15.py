"""Figure 15: two encoders and the small or large LLM, three ways to place the encoders.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix B.3, Figure 15.
Setup:   A40 GPUs, 24 microbatches of one sample (1k text tokens, one 1280x720 image and a 30 s clip),
         encoders and LLM frozen, projectors trained, activation checkpointing;
         stages, TP 2 and CP 2 of Table 6.
Given:   printed stage counts and model sizes; 6 stages for replicated encoders -> throughput per GPU of the
         simulated plans with the A40 profile.
Differs: neither the bars nor the text of this figure has numbers; judged is who is ahead.
Ours:    simulated on one CPU core, some minutes.
Run:     python -m experiments.cornstarch_v1.figure15
"""

from experiments.cornstarch.end_to_end import figure_evidence
from experiments.cornstarch.modelled import A40
from experiments.harness.script import Parts, main, script
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@script(profile=A40)
def run() -> Parts:
    """All models of the figure."""
    evidence = figure_evidence("Figure 15", ("S", "L"), ("VALM",), CostModel(load_profile(A40)))
    return [evidence]


if __name__ == "__main__":
    main(run)
