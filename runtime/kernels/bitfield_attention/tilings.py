"""Kernel tile sizes per pass, head width and architecture, each with its reason.

Of Hopper's, forward and fused backward at width 128 were the fastest of twelve and nine tilings on an H100
(`experiments.bench.kernel_tiles`, causal and EE at 16k); on EE 128 x 64 on 4 warps is as fast forward. The
others are not tuned yet.
"""

from dataclasses import dataclass, replace
from enum import Enum

import torch

from workbench.plan.kernel_heads import HEAD_DIMS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Pass(Enum):
    """The matrix kernels."""

    FORWARD = "forward"
    FUSED = "dK, dV and dQ by atomics"
    ENGINE = "dK, dV and dQ by the copy engine"
    KEYS = "dK and dV"
    QUERIES = "dQ"


@dataclass(frozen=True, slots=True)
class Tiling:
    """`block_m` queries by `block_n` keys at a time, and Triton's launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The bounds behind every row, at bf16. Shared memory: forward and dQ hold the query tiles and
# num_stages x (K, V); dK/dV holds K, V and num_stages x (Q, dO), plus P and dS. Registers: 255 a
# thread; compiled for each architecture, the assembler's spill is noted where there is one.
# Hopper and newer (227 KB): 8 warps are two warpgroups of 64 rows each. Forward of width 128 takes 128
# keys and three buffers of them, 226 KB: a copy is under way while the one before it is used. Width 64
# can afford square tiles, but spills 432 bytes a thread on 4 warps; width 256 takes 64 keys, since 32
# leave wgmma half idle. The backward takes keys wide and queries narrow: atomics on dQ go with the number
# of key blocks. With dQ added by the copy engine two buffers of queries do: every step waits until the last
# tile was read, and the assembler has one scoreboard for that and for all copies, so none outlasts a step.
# They take 488 instructions a tile of width 128 and spill 72 bytes a thread (three buffers: 514 and 64).
# experiments/results/bench_kernel_compile.json holds what each compiles to.
HOPPER = {
    (Pass.FORWARD, 64): Tiling(128, 128, 8, 3),
    (Pass.FORWARD, 128): Tiling(128, 128, 8, 3),
    (Pass.FORWARD, 256): Tiling(128, 64, 8, 2),
    (Pass.FUSED, 64): Tiling(64, 128, 8, 3),
    (Pass.FUSED, 128): Tiling(64, 128, 8, 3),
    (Pass.FUSED, 256): Tiling(32, 64, 8, 2),
    (Pass.ENGINE, 64): Tiling(64, 128, 8, 2),
    (Pass.ENGINE, 128): Tiling(64, 128, 8, 2),
    (Pass.ENGINE, 256): Tiling(32, 64, 8, 2),
    (Pass.KEYS, 64): Tiling(64, 128, 8, 3),
    (Pass.KEYS, 128): Tiling(64, 128, 8, 2),
    (Pass.KEYS, 256): Tiling(32, 64, 8, 2),
    (Pass.QUERIES, 64): Tiling(128, 64, 8, 3),
    (Pass.QUERIES, 128): Tiling(128, 64, 8, 2),
    (Pass.QUERIES, 256): Tiling(128, 32, 8, 2),
}
# A100 (163 KB), mma instead of wgmma: one size down where Hopper's would not fit or spill much.
# Spills: forward 24 bytes at width 64; fused 160 at 128 and 40 at 256; dK/dV 48 and 32.
AMPERE = HOPPER | {
    (Pass.FORWARD, 64): Tiling(128, 64, 4, 3),
    (Pass.FORWARD, 128): Tiling(128, 64, 8, 3),
    (Pass.FORWARD, 256): Tiling(64, 64, 8, 2),
    (Pass.FUSED, 128): Tiling(32, 128, 8, 2),
    (Pass.KEYS, 128): Tiling(32, 128, 8, 2),
    (Pass.FUSED, 256): Tiling(16, 64, 8, 1),
    (Pass.KEYS, 256): Tiling(32, 64, 8, 1),
    (Pass.QUERIES, 256): Tiling(64, 32, 8, 2),
}
# Ampere and Ada without the large L1 (99 KB): half the tiles of the A100, never more than two stages.
SMALL = {
    (which, width): Tiling(
        min(tiling.block_m, 64 if width < 256 else 32),
        min(tiling.block_n, 64 if width < 256 else 32),
        4,
        1 if width == 256 else 2,
    )
    for (which, width), tiling in AMPERE.items()
}
# Exact float32 products run on the ordinary cores, unrolled: larger tiles spill hundreds of registers
# a thread, and there is no pipeline to fill.
FLOAT32 = {64: Tiling(32, 32, 8, 1), 128: Tiling(16, 16, 8, 1), 256: Tiling(16, 16, 8, 1)}


def tiling(
    which: Pass, head_dim: int, dtype: torch.dtype, device: torch.device, block_q: int, block_k: int
) -> Tiling:
    """The row of the table for that device, never larger than the plan's tiles.

    A width between two rows takes the wider one: in registers it is padded to a power of two.
    Off the GPU (Triton's interpreter) Hopper's rows stand in.

    Raises:
        ValueError: a head width that is none of HEAD_DIMS, or another dtype, or a GPU older
            than compute capability 8.0.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dim: want one of {HEAD_DIMS}, got {head_dim}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: want one of {', '.join(map(str, DTYPES))}, got {dtype}")
    table = _table(device)
    width = next(width for width in FLOAT32 if head_dim <= width)
    found = FLOAT32[width] if dtype == torch.float32 else table[which, width]
    return replace(found, block_m=min(found.block_m, block_q), block_n=min(found.block_n, block_k))


def _table(device: torch.device) -> dict[tuple[Pass, int], Tiling]:
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(f"compute capability: want 8.0 or newer, got {major}.{minor}")
    if major >= 9 and (major, minor) < (12, 0):
        return HOPPER
    return AMPERE if (major, minor) == (8, 0) else SMALL
