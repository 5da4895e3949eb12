"""Attention simulated tile by tile, compared with a profile's table for the same launch.

Ours:    the time of `sim.attention`, which prices attention under context parallelism, over that of the
         table, which prices all other attention, where both apply: one causal row on one rank. 1 is the same
         price. `anchored`: as plans are priced; `long`: with a tile's time in a launch of 16,384 tokens, so
         that short rows lose only by loads, launches and waiting units.
Setup:   32 heads of queries and 8 of keys, 128 wide, bfloat16, A40 and H100; lengths of whole tiles and not.
Goal:    anchored within 2 %; no run under context parallelism on GPUs is available to say more.
Run:     python -m experiments.bench.tiled_attention [--json]
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.harness.command import Found, bench, print_rows
from sim.attention.gpu import compute_units
from sim.attention.policies import Gpu, Kernel, Wires, launches_of, simulate_attention
from sim.attention.price import (
    anchored_gpus,
    backward_gpu,
    column_tiles,
    gpu_of,
    rank_tiles,
    row_tiles,
)
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP, Grid, RowWork, Work
from workbench.masks.builders import causal
from workbench.model.layer import Attention

DEVICES = ("A40", "H100")
LENGTHS = (128, 512, 700, 1024, 2048, 3000, 4096, 8192, 16384)
PRECISION = "bfloat16"
OPERATOR = Attention(name="attention", num_heads=32, num_kv_heads=8, head_dim=128, causal=True)


class Row(NamedTuple):
    """Seconds from tiles over seconds from the table."""

    device: str
    length: int
    anchored_forward: float
    anchored_backward: float
    long_forward: float
    long_backward: float


def rows() -> Iterator[Row]:
    for device in DEVICES:
        cost = CostModel(load_profile(device))
        yield from (beside(device, cost, length) for length in LENGTHS)


def beside(device: str, cost: CostModel, length: int) -> Row:
    """Price one causal row on one rank both ways."""
    work = Work((RowWork(length, length, length * (length + 1) // 2),))
    forward_s, _ = cost.attention_s(OPERATOR, work, Grid(), PRECISION)
    backward_s = forward_s * ATTENTION_BACKWARD_FLOP / cost.attention_backward_rate(OPERATOR, work, Grid())
    num_units = compute_units(cost.profile.device)
    anchored = anchored_gpus(cost, OPERATOR, work, tp=1, precision=PRECISION, num_units=num_units)
    long = gpu_of(cost, OPERATOR, precision=PRECISION, num_units=num_units)
    tiled_s = [*_tiled_s(length, *anchored), *_tiled_s(length, long, backward_gpu(cost, OPERATOR, long))]
    table_s = (forward_s, backward_s) * 2
    return Row(device, length, *(tiles / table for tiles, table in zip(tiled_s, table_s, strict=True)))


def _tiled_s(length: int, forward: Gpu, backward: Gpu) -> Iterator[float]:
    (tiles,) = rank_tiles(causal(length), [np.arange(length)])
    launches = launches_of(OPERATOR, tp=1, kv_heads_per_launch=OPERATOR.num_kv_heads)
    for work_of_blocks, gpu in ((row_tiles(tiles), forward), (column_tiles(tiles), backward)):
        yield simulate_attention([work_of_blocks], launches, gpu, Wires(), Kernel()).makespan_s


@bench()
def run() -> Found:
    """Print all rows, and the least and largest ratio of both passes."""
    printed = print_rows(
        "device  tokens  anchored: forward  backward  long: forward  backward",
        rows(),
        lambda row: (
            f"{row.device:6} {row.length:7} {row.anchored_forward:18.3f} {row.anchored_backward:9.3f} "
            f"{row.long_forward:14.2f} {row.long_backward:9.2f}"
        ),
    )
    record: dict[str, object] = {"rows": [row._asdict() for row in printed]}
    for name in ("anchored", "long"):
        ratios = [
            getattr(row, f"{name}_{direction}") for row in printed for direction in ("forward", "backward")
        ]
        record |= {f"{name}_least": min(ratios), f"{name}_most": max(ratios)}
    return Found(record)
