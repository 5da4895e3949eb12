"""Tilings of the attention kernels on one GPU: each pass with every tiling that may fit, and the table's own.

Setup:   bf16, batch 1, 32 query and 8 key/value heads of width 128 (or 32 heads of another width), 16,384
         tokens, masks causal, EE and MP. Tilings take turns on the same tensors with the L2 cache flushed
         between them; medians are compared. FLOP by exact mask area. With --compile nothing is timed: every
         tiling is compiled and run once, which fills Triton's cache for a later call.
Ours:    the row of `tilings.py` for that device is marked; a tiling that does not fit is listed with its
         error.
Run:     python -m experiments.bench.kernel_tiles [--json] [--widths 128 ...] [--masks causal EE MP]
         [--passes FORWARD FUSED ...] [--seconds S] [--compile]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from experiments.bench.kernel_cells import MASKS, Cell, Stage, set_up
from experiments.bench.kernel_turns import event_clock
from experiments.harness.command import run_main
from runtime.kernels.bitfield_attention.attention import Backward, Options, bitfield_attention
from runtime.kernels.bitfield_attention.tilings import Pass, Tiling, tiling
from runtime.measure.clock import quartile_spread
from runtime.world.device import device_of

LENGTH = 16384
LEAST_ROUNDS, MOST_ROUNDS = 5, 50
HEADS = {128: (32, 8)}  # of query, of key and value; other widths have 32 of each
TILES = {
    Pass.FORWARD: [(128, 128, 8, s) for s in (2, 3)]
    + [(128, 64, 8, s) for s in (2, 3, 4)]
    + [(128, 64, 4, s) for s in (2, 3)]
    + [(64, 128, 4, s) for s in (2, 3)]
    + [(64, 64, 4, s) for s in (2, 3, 4)],
    Pass.FUSED: [(64, 128, 8, s) for s in (1, 2, 3)]
    + [(64, 64, 4, s) for s in (2, 3)]
    + [(128, 64, 8, 2), (32, 128, 8, 3), (128, 128, 8, 1), (64, 128, 4, 2)],
    Pass.ENGINE: [(64, 128, 8, s) for s in (1, 2, 3)]
    + [(64, 64, 8, s) for s in (2, 3)]
    + [(32, 128, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1), (128, 128, 8, 1)],
    Pass.KEYS: [(64, 128, 8, s) for s in (1, 2, 3)] + [(64, 64, 4, 2), (32, 128, 8, 3)],
    Pass.QUERIES: [(128, 64, 8, s) for s in (1, 2, 3)] + [(64, 64, 4, 3), (128, 128, 8, 2)],
}
BACKWARD = {
    Pass.FORWARD: Backward.FUSED,  # not run
    Pass.FUSED: Backward.FUSED,
    Pass.ENGINE: Backward.ENGINE,
    Pass.KEYS: Backward.DETERMINISTIC,
    Pass.QUERIES: Backward.DETERMINISTIC,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRow:
    """One pass under one tiling: a median time, or the error.

    A backward of two passes, as KEYS and QUERIES have it, counts as a whole.
    """

    mask: str
    head_dim: int
    which: str
    tile: tuple[int, int, int, int]  # queries, keys, warps, stages
    is_table: bool
    seconds: float | None = None
    spread: float | None = None
    flop_per_s: float | None = None
    error: str | None = None


def rows_of(
    mask: str, head_dim: int, passes: Sequence[Pass], device: torch.device, seconds: float | None
) -> list[TileRow]:
    """Measure all tilings of some passes on one mask; `seconds` None: each runs once, untimed."""
    heads, kv_heads = HEADS.get(head_dim, (32, 32))
    cell = Cell(mask, LENGTH, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    stage = set_up(cell, device)
    clock = event_clock(device)
    return [row for which in passes for row in _pass_rows(stage, which, clock, seconds)]


def _pass_rows(
    stage: Stage, which: Pass, clock: Callable[[Callable[[], object]], float], seconds: float | None
) -> list[TileRow]:
    block = stage.plan.block_q
    table = tiling(which, stage.cell.head_dim, stage.q.dtype, stage.q.device, block, stage.plan.block_k)
    candidates = dict.fromkeys([table, *(Tiling(*tile) for tile in TILES[which])])
    rows, able = [], {}
    for tile in candidates:
        what: dict[str, Any] = {
            "mask": stage.cell.mask,
            "head_dim": stage.cell.head_dim,
            "which": which.name,
            "tile": (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages),
            "is_table": tile == table,
        }
        try:
            call = _call(stage, which, tile)
            call()
            torch.cuda.synchronize()
            able[tile] = what, call
        except Exception as error:  # whatever a compiler or the driver raises is that tiling's result
            rows.append(TileRow(**what, error=f"{type(error).__name__}: {' '.join(str(error).split()):.200}"))
    if seconds is None:
        return rows + [TileRow(**what) for what, _ in able.values()]
    times: dict[Tiling, list[float]] = {tile: [] for tile in able}
    begin_s = time.perf_counter()
    for done in range(MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() - begin_s > seconds * len(able):
            break
        for tile, (_, call) in able.items():
            times[tile].append(clock(call))
    passes = 1.0 if which is Pass.FORWARD else 2.5
    for tile, (what, _) in able.items():
        median_s = statistics.median(times[tile])
        rate = passes * stage.forward_flop / median_s
        spread = quartile_spread(times[tile])
        rows.append(TileRow(**what, seconds=median_s, spread=spread, flop_per_s=rate))
    return rows


def _call(stage: Stage, which: Pass, tile: Tiling) -> Callable[[], object]:
    """Return a callable of the pass alone: forwards keep nothing, backwards reuse one graph."""
    options = Options(backward=BACKWARD[which], tilings=((which, tile),))
    trained = which is not Pass.FORWARD
    q, k, v = (x.detach().requires_grad_(trained) for x in (stage.q, stage.k, stage.v))
    forward = partial(bitfield_attention, q, k, v, stage.mask, stage.plan, options=options)
    if not trained:
        return forward
    out = forward()
    return lambda: torch.autograd.grad(out, (q, k, v), stage.do, retain_graph=True)


def describe(row: TileRow) -> str:
    """Format a row as a line of the table."""
    queries, keys, warps, stages = row.tile
    mark = "*" if row.is_table else " "
    line = f"{row.mask:7s} {row.head_dim:4d} {row.which:8s}{mark} {queries:3d}x{keys:<3d} w{warps} s{stages}"
    if row.seconds is None or row.flop_per_s is None:
        return f"{line} {row.error or 'ok'}"
    return f"{line} {row.seconds * 1e3:8.3f} ms +-{row.spread or 0:5.1%} {row.flop_per_s / 1e12:6.1f} TFLOP/s"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the tilings; exit status 2 for bad input, such as no GPU."""
    arguments = _parser().parse_args(argv)
    return run_main(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    device = device_of("cuda")
    passes = [Pass[name] for name in arguments.passes]
    rows: list[TileRow] = []
    for width in arguments.widths:
        for mask in arguments.masks:
            new_rows = rows_of(mask, width, passes, device, None if arguments.compile else arguments.seconds)
            for row in new_rows:
                print(describe(row), flush=True)
            rows += new_rows
    if arguments.json:
        print(
            json.dumps(
                {
                    "script": "experiments.bench.kernel_tiles",
                    "device": torch.cuda.get_device_name(device),
                    "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
                    "date": time.strftime("%Y-%m-%d"),
                    "rows": [asdict(row) for row in rows],
                }
            )
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--widths", type=int, nargs="+", default=[128], help="of heads")
    parser.add_argument("--masks", nargs="+", default=["causal", "EE", "MP"], choices=list(MASKS))
    parser.add_argument("--passes", nargs="+", default=[p.name for p in Pass], choices=[p.name for p in Pass])
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring, per tiling and mask")
    parser.add_argument("--compile", action="store_true", help="compile and run each once, time nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
