"""Section 2.6: as `chaos`, where the ranks of a node are one stage and shard its weights.

Paper:   I. Jang, dissertation, sections 2.5 and 2.6. It prints no recovery time to compare with.
Setup:   as `chaos`: 8 nodes of 2 ranks, kills, warnings and joins at the same moments of a step, and while
         ranks gather weights. Each rank keeps half of every weight of its stage and of its optimizer state.
Ours:    executed; lost parts are copied from the ranks that hold the same parts in other pipelines.
Run:     python -m experiments.oobleck.chaos_sharded [--kills 50] [--seed 0] [--json]
"""

import sys

from experiments.oobleck.chaos import main
from workbench.plan.plan import Sharding

if __name__ == "__main__":
    sys.exit(main(Sharding.PARAMETERS))
