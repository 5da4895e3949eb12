"""Table A4: encoders on an island of 8 GPUs beside a 120B LLM, against one layout for all.

Paper:   Karnati et al., Table A4.
Setup:   6B to 12B encoders, 8K and 16K, 256 or 512 GPUs and 8 more for the island; printed layouts.
Given:   layouts, batch sizes; encoders are recomputed, the LLM is not. Two numbers of the machine are fitted
         on homogeneous step times (`calibration`).
Differs: sizes and patches per vision token are ours: with a patch for each token, the printed island
         would have to run above a GPU's peak.
Ours:    plans of the strategies, simulated, about 2 minutes on one CPU core.
"""

from experiments.harness.script import Parts, script
from experiments.mimo.gains import gain_evidence
from experiments.mimo.models import PROFILE
from experiments.mimo.rows import table_a4


@script(profile=PROFILE)
def run() -> Parts:
    return [gain_evidence("Table A4", table_a4())]
