"""Attention simulated tile by tile beside what a profile's table says of the same launch.

Ours:    the time of `sim.attention`, which prices attention whose tokens ranks share, over that of the table,
         which prices all other, where both can tell: one causal row on one rank. 1 would be the same price.
Setup:   32 heads of queries and 8 of keys, 128 wide, bfloat16, A40 and H100.
Why:     a tile takes what it takes in a launch of 16,384 tokens; what short rows lose is loads, launches and
         units that wait for the last one, and the simulation has these alone.
Goal:    none; no run with shared tokens on GPUs says which of the two is right.
Run:     python -m experiments.bench.tiled_attention [--json]
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.harness.command import command_line, finish, print_rows
from sim.attention.gpu import compute_units
from sim.attention.policies import Kernel, Wires, launches_of, simulate_attention
from sim.attention.price import backward_gpu, column_tiles, gpu_of, rank_tiles, row_tiles
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP, Grid, RowWork, Work
from workbench.masks.builders import causal
from workbench.model.layer import Attention

DEVICES = ("A40", "H100")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PRECISION = "bfloat16"
OPERATOR = Attention(name="attention", num_heads=32, num_kv_heads=8, head_dim=128, causal=True)


class Row(NamedTuple):
    """Seconds by tiles over seconds by the table."""

    device: str
    length: int
    forward: float
    backward: float


def rows() -> Iterator[Row]:
    for device in DEVICES:
        cost = CostModel(load_profile(device))
        yield from (beside(device, cost, length) for length in LENGTHS)


def beside(device: str, cost: CostModel, length: int) -> Row:
    """Of one causal row on one rank."""
    work = Work((RowWork(length, length, length * (length + 1) // 2),))
    forward_s, _ = cost.attention_s(OPERATOR, work, Grid(), PRECISION)
    backward_s = forward_s * ATTENTION_BACKWARD_FLOP / cost.attention_backward_rate(OPERATOR, work, Grid())
    gpu = gpu_of(cost, OPERATOR, precision=PRECISION, num_units=compute_units(cost.profile.device))
    (tiles,) = rank_tiles(causal(length), [np.arange(length)])
    launches = launches_of(OPERATOR, tp=1, kv_heads_per_launch=OPERATOR.num_kv_heads)
    tiled_s = [
        simulate_attention([work_of_blocks], launches, units, Wires(), Kernel()).makespan_s
        for work_of_blocks, units in (
            (row_tiles(tiles), gpu),
            (column_tiles(tiles), backward_gpu(cost, OPERATOR, gpu)),
        )
    ]
    return Row(device, length, tiled_s[0] / forward_s, tiled_s[1] / backward_s)


def main() -> int:
    """Print all rows, and the least and most of each device."""
    options = command_line(__doc__).parse_args()
    found = print_rows(
        "device  tokens  forward  backward",
        rows(),
        lambda row: f"{row.device:6} {row.length:7} {row.forward:8.2f} {row.backward:9.2f}",
    )
    record: dict[str, object] = {"rows": [row._asdict() for row in found]}
    for device in DEVICES:
        ratios = [each for row in found if row.device == device for each in (row.forward, row.backward)]
        record |= {f"{device}_least": min(ratios), f"{device}_most": max(ratios)}
    return finish(record, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
