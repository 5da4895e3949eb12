"""Table 7: modality parallelism against colocated encoders, small LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix C, Table 7.
Setup:   A40 GPUs, 24 microbatches of one sample: 1k text tokens, one 1280x720 image, a 30 s clip.
Given:   printed stage counts, model sizes and plausible inputs -> throughput per GPU of the simulated plans
         with the A40 profile. No stage times are printed, so there is no other evidence.
Differs: Table 6, whose stages these are, states TP 2 and CP 2, which takes more GPUs than there are.
         Absolute throughputs are higher in print, as in Tables 3, 10 and 11; see experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
Run:     python -m experiments.cornstarch_v1.table7
"""

from experiments.cornstarch.modality_tables import layout_evidence, modality_evidence
from experiments.cornstarch.modelled import A40
from experiments.harness.script import Parts, main, script
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@script(profile=A40)
def run() -> Parts:
    """All evidence of the table."""
    own = modality_evidence("S", CostModel(load_profile(A40)))
    return [own, layout_evidence("S")]


if __name__ == "__main__":
    main(run)
