"""Speedup of the parametric search over the paper's dynamic programme when cutting a chain.

Paper:   Cornstarch (ICML) section 4.1, Eq. 5-6: hundreds of layers, tens of stages, O(N^2 K).
Setup:   random layer costs; both in one run, alternating, the fastest of several repeats each.
Ours:    `workbench.balance.stages.partition`; the bottlenecks of both are compared on every chain.
Run:     python -m experiments.bench.partition_speed [--json]
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from experiments.harness.command import Found, bench, fastest_s, print_rows
from workbench.balance.stages.partition import Cuts, bottleneck_s, partition, partition_as_printed
from workbench.float_sum import float_sum

SIZES = ((32, 4), (64, 8), (128, 16), (256, 24), (512, 32))
REPEATS = 3


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """Seconds to cut one chain of N layers into K stages; `same` says whether the bottlenecks are equal."""

    num_layers: int
    num_stages: int
    printed_s: float
    ours_s: float
    bottleneck_only_s: float
    same: bool

    @property
    def ratio(self) -> float:
        return self.printed_s / self.ours_s


def measure(num_layers: int, num_stages: int, seed: int = 0) -> PartitionRow:
    """Time the three algorithms on one random chain."""
    rng = random.Random(seed)
    cost_s = [rng.lognormvariate(0, 0.5) * 1e-3 for _ in range(num_layers)]
    printed, ours, only = [], [], []
    for _ in range(REPEATS):
        printed.append(fastest_s(lambda: partition_as_printed(cost_s, num_stages), 1))
        ours.append(fastest_s(lambda: partition(cost_s, num_stages), 1))
        only.append(fastest_s(lambda: bottleneck_s(cost_s, num_stages), 1))
    slowest = [_slowest(cost_s, cut(cost_s, num_stages)) for cut in (partition_as_printed, partition)]
    return PartitionRow(
        num_layers, num_stages, min(printed), min(ours), min(only), abs(slowest[0] - slowest[1]) < 1e-12
    )


def _slowest(cost_s: Sequence[float], cuts: Cuts) -> float:
    return max(float_sum(cost_s[first:end]) for first, end in cuts)


@bench()
def run() -> Found:
    rows = print_rows(
        "layers stages   printed      ours  bottleneck only  printed / ours",
        (measure(*size) for size in SIZES),
        lambda row: (
            f"{row.num_layers:6d} {row.num_stages:6d} {row.printed_s * 1e3:6.1f} ms "
            f"{row.ours_s * 1e3:6.2f} ms {row.bottleneck_only_s * 1e3:13.2f} ms {row.ratio:14.1f}x"
        ),
    )
    result = {
        "ratio": rows[-1].ratio,
        "ratio_per_size": {f"{row.num_layers}x{row.num_stages}": row.ratio for row in rows},
        "same_bottleneck": all(row.same for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    claims = {"equal bottlenecks on every chain": result["same_bottleneck"] is True}
    return Found(result, claims)
