"""Table A2: a layout for each module on shared GPUs at 8K, against one layout for all.

Paper:   Karnati et al., Table A2.
Setup:   1B to 12B encoders with 14B to 120B LLMs on 72 or 256 H100s, printed layouts on both sides.
Given:   layouts, optimizer instances, batch sizes; encoders from 3B on are recomputed, LLMs are not.
         Two numbers of the machine are fitted on homogeneous step times (`calibration`).
Differs: sizes are ours (`module_sizes.csv`); gains are compared by the printed step times.
Ours:    plans of the strategies, simulated, about 2 minutes on one CPU core.
"""

from experiments.harness.script import Parts, script
from experiments.mimo.gains import gain_evidence
from experiments.mimo.models import PROFILE
from experiments.mimo.rows import table_a2


@script(profile=PROFILE)
def run() -> Parts:
    return [gain_evidence("Table A2", table_a2())]
