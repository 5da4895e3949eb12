"""Table 8: modality parallelism against colocated encoders, large LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, appendix C, Table 8.
Setup:   A40 GPUs, 24 microbatches of one sample: 1k text tokens, one 1280x720 image, a 30 s clip.
Given:   printed stage counts, model sizes and plausible inputs -> throughput per GPU of the simulated plans
         with the A40 profile. No stage times are printed, so there is no other evidence.
Differs: VALM-ML prints 6+1 colocated stages where Table 6 has 4+3, and throughputs a third below its
         neighbours; our model gives its ratio, not its absolute drop.
         Absolute throughputs are higher in print, as in Tables 3, 10 and 11; see experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
Run:     python -m experiments.cornstarch_v1.table8
"""

from experiments.cornstarch.modality_tables import layout_evidence, modality_evidence
from experiments.cornstarch.modelled import A40
from experiments.harness.script import Parts, main, script
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@script(profile=A40)
def run() -> Parts:
    """All evidence of the table."""
    own = modality_evidence("L", CostModel(load_profile(A40)))
    return [own, layout_evidence("L")]


if __name__ == "__main__":
    main(run)
