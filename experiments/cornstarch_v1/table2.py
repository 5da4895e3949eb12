"""Table 2: modality parallelism against colocated encoders, medium LLM.

Paper:   I. Jang et al., "Cornstarch", arXiv v1, section 6.3, Table 2.
Setup:   A40 GPUs, 24 microbatches of one sample: 1k text tokens, one 1280x720 image, a 30 s clip.
Given:   printed stage counts, model sizes and plausible inputs -> throughput per GPU of the simulated plans
         with the A40 profile. No stage times are printed, so there is no other evidence.
Differs: the first row's modality-parallel throughput is lost in the text of the PDF; its ratio is not held
         against anything.
         Absolute throughputs are higher in print, as in Tables 3, 10 and 11; see experiments/LOG.md.
Ours:    simulated on one CPU core, seconds.
Run:     python -m experiments.cornstarch_v1.table2
"""

from experiments.cornstarch.modality_tables import modality_evidence
from experiments.cornstarch.modelled import A40
from experiments.harness.script import Parts, main, script
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile


@script(profile=A40)
def run() -> Parts:
    """All evidence of the table."""
    own = modality_evidence("M", CostModel(load_profile(A40)))
    return [own]


if __name__ == "__main__":
    main(run)
