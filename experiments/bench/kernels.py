"""Bitfield attention against FlexAttention and SDPA on one device: bars K1 to K13, and the goals' ratios.

Setup:   bf16, batch 1, 32 query and 8 key/value heads of width 128; causal, EP, EE and MP masks from fixed
         seeds; one rank of 8 with one key/value head; widths 64 and 256. Contenders of a cell take turns on
         the same tensors with the L2 cache flushed between them; medians and spreads are compared. FLOP by
         exact mask area, never by blocks; the backward counts 2.5 forwards. Every rival's mask is built
         beforehand; building it is timed separately (K7), from the same folded words on the device.
Order:   the cells of the goals first: whole launches at 16k and 64k, then our variants, ranks and widths,
         more draws, and last the cells that take minutes to compile. With --out every finished row is written
         to the file, and a call that finds rows there resumes after them.
Run:     python -m experiments.bench.kernels [--json] [--device cuda|cpu] [--small] [--limit SECONDS]
         [--lengths 16384 ...] [--cells WORD ...] [--contenders NAME ...] [--seeds N] [--seconds S]
         [--out PATH]
         Exit code 1 where a contender failed or a bar is off. On a CPU kernels run under Triton's
         interpreter: only --small finishes there, and its times are not compared with the bars.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton

from experiments.bench.kernel_bars import bars, least_ratios, simulated_forwards
from experiments.bench.kernel_cells import MASKS, Cell, Contender, has_flash_backend, runs_on
from experiments.bench.kernel_rows import BITS, PLAN, KernelRow, RowFile
from experiments.bench.kernel_turns import Unit, directions, event_clock, host_clock, row_of, unit_rows
from experiments.harness.command import run_main
from runtime.kernels.bitfield_attention.forward import forward_kernel
from runtime.world.device import device_of

LENGTHS = (16384, 65536, 32768)
WIDTH_LENGTH = 16384
LOCAL_LENGTH = 65536
SMALL_LENGTH = 70
INTERPRETED = "cpu, interpreted"  # a device of which nothing is judged
FIRST_UNIT_S = 60.0  # what a unit may take on a GPU before one was seen
RIVALS = (Contender.FLEX, Contender.CUDNN, Contender.FLASH)
VARIANTS = (
    Contender.ENGINE,
    Contender.WHOLE,
    Contender.DETERMINISTIC,
    Contender.FIXED,
    Contender.PUBLISHED,
)
SLOW = (Contender.FLEX_TUNED, Contender.FLEX_FLASH)  # compile for minutes


def cells(lengths: Sequence[int], seeds: int) -> Iterator[tuple[str, Cell]]:
    """Yield (kind, cell) in priority order for the goals: whole launches by length, ranks, widths, draws."""
    for seed in range(seeds):
        for length in lengths:
            for mask in MASKS:
                if seed == 0 or mask != "causal":
                    yield "full", Cell(mask, length, seed=seed)
        for group in (4, 1):
            for mask in ("EE", "MP"):
                yield f"cp g={group}", Cell(mask, LOCAL_LENGTH, heads=group, kv_heads=1, ranks=8, seed=seed)
        for head_dim in (64, 256) if seed == 0 else ():
            for mask in MASKS:
                yield f"hd{head_dim}", Cell(mask, WIDTH_LENGTH, head_dim=head_dim)


def small_units() -> list[Unit]:
    """Units small enough for the interpreter."""
    tiny = {mask: Cell(mask, SMALL_LENGTH, heads=2, kv_heads=1, head_dim=64) for mask in ("causal", "MP")}
    return [
        Unit("full", tiny["causal"], (Contender.OURS, Contender.FLEX, Contender.FLASH)),
        Unit("full", tiny["MP"], (Contender.OURS, Contender.FLEX)),
        Unit(PLAN, tiny["MP"], (Contender.OURS, Contender.FLEX)),
        Unit(BITS, tiny["MP"], (Contender.DETERMINISTIC,)),
    ]


def units(listed: Sequence[tuple[str, Cell]]) -> Iterator[Unit]:
    """Yield units in order: first draws against rivals; plans; our variants; more draws; slow compilers."""
    first = [(kind, cell) for kind, cell in listed if cell.seed == 0]
    more = [(kind, cell) for kind, cell in listed if cell.seed]
    yield from _against(RIVALS, first)
    ours = [cell for kind, cell in first if kind == "full" and cell.mask == "EE"]
    if ours:
        largest = max(ours, key=lambda cell: cell.length)
        yield Unit(PLAN, largest, (Contender.OURS, Contender.FLEX))
        yield Unit(BITS, ours[0], (Contender.DETERMINISTIC,))
    yield from _against(VARIANTS, first)
    yield from _against(RIVALS, more)
    yield from _against(VARIANTS, more)
    for contender in SLOW:
        yield from _against((contender,), first)


def _against(others: Sequence[Contender], listed: Sequence[tuple[str, Cell]]) -> Iterator[Unit]:
    for kind, cell in listed:
        able = contenders_of(kind, cell)
        yield Unit(kind, cell, (Contender.OURS, *(contender for contender in others if contender in able)))


def contenders_of(kind: str, cell: Cell) -> list[Contender]:
    """Contenders that can run a cell: SDPA only causal; max-autotune, slow to compile, no other widths."""
    plain = [Contender.FLEX, Contender.OURS, Contender.ENGINE, Contender.WHOLE, Contender.DETERMINISTIC]
    if kind == "full":
        plain += [Contender.FLEX_TUNED, Contender.FIXED, Contender.PUBLISHED]
        plain += [Contender.FLEX_FLASH] if has_flash_backend() else []
        if cell.mask == "causal":
            plain += [Contender.FLASH, Contender.CUDNN]
    elif kind.startswith("cp"):
        plain += [Contender.FIXED, Contender.PUBLISHED]
    return plain


def missing(unit: Unit, file: RowFile, device: torch.device, dtype: torch.dtype) -> Unit | None:
    """The part of the unit that has no rows yet, with ours for comparison; None if complete."""
    lacking = [
        contender
        for contender in unit.who
        if any(
            row_of(unit, dtype, direction, contender).key not in file.rows
            for direction in directions(unit, contender, device)
        )
    ]
    if not lacking:
        return None
    return replace(
        unit, who=(unit.who[0], *(contender for contender in lacking if contender is not unit.who[0]))
    )


def go_on(
    planned: Sequence[Unit], file: RowFile, device: torch.device, *, limit_s: float, seconds: float
) -> int:
    """Measure units without rows until the next one may exceed the time limit.

    Returns:
        How many units are left.
    """
    is_gpu = device.type == "cuda"
    clock, dtype = (event_clock(device), torch.bfloat16) if is_gpu else (host_clock, torch.float16)
    begin_s, longest_s = time.perf_counter(), FIRST_UNIT_S if is_gpu else 0.0
    unfinished = [todo for unit in planned if (todo := missing(unit, file, device, dtype)) is not None]
    while unfinished and time.perf_counter() - begin_s + longest_s <= limit_s:
        start_s = time.perf_counter()
        todo = missing(unfinished.pop(0), file, device, dtype)
        if todo is None:
            continue
        rows = unit_rows(todo, device, dtype, clock, seconds)
        file.add(rows)
        for row in rows:
            print(describe(row), flush=True)
        longest_s = max(longest_s, time.perf_counter() - start_s)
    return len(unfinished)


def describe(row: KernelRow) -> str:
    """Format a row as a line of the table."""
    line = f"{row.key:64s}"
    if row.seconds is None:
        return f"{line} {row.error or 'ok'}"
    line += f" {row.seconds * 1e3:10.3f} ms +-{row.spread or 0.0:6.1%}"
    if row.flop is None:
        return line
    flop = row.flop * (2.5 if row.direction == "backward" else 1.0)
    return f"{line} {flop / row.seconds / 1e12:7.1f} TFLOP/s"


def record(file: RowFile) -> dict[str, Any]:
    """Return what `--json` prints: the goals' ratios, bars, simulated forwards and every row."""
    rows = list(file.rows.values())
    counted = [] if file.head["device"] == INTERPRETED else rows
    bars_of_rows = bars(counted)
    return {
        **file.head,
        "date": time.strftime("%Y-%m-%d"),
        **least_ratios(counted),
        "failed": [f"{row.key}: {row.error}" for row in rows if row.error is not None],
        "bars": [{**asdict(bar), "verdict": bar.verdict} for bar in bars_of_rows],
        "simulated": [asdict(row) | {"error": row.error} for row in simulated_forwards(counted)],
        "rows": [{"key": row.key, **asdict(row)} for row in rows],
    }


def show(result: dict[str, Any], left: int) -> None:
    """Print the summary of a call."""
    for bar in result["bars"]:
        value = "-" if bar["value"] is None else f"{bar['value']:.4g}"
        sign = "<=" if bar["at_most"] else ">="
        print(f"{bar['key']:10s} {bar['meaning']:66s} {value:>9s} {sign} {bar['must']:g} {bar['verdict']}")
    for row in result["simulated"]:
        print(
            f"simulated {row['kind']:7s} {row['mask']:6s} {row['length'] // 1024:3d}k "
            f"{row['simulated_s'] * 1e3:9.3f} ms, measured {row['measured_s'] * 1e3:9.3f} ms, "
            f"error {row['error']:+.1%}"
        )
    for name in ("flex_forward_min", "flex_backward_min", "cudnn_causal_min"):
        print(f"{name:18s} {'not measured' if result[name] is None else format(result[name], '.4g')}")
    print(f"{len(result['rows'])} rows, {len(result['failed'])} of them errors; {left} units left")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 0 where every measured goal is met, 2 for bad input."""
    arguments = _parser().parse_args(argv)
    if arguments.device == "cpu" and isinstance(forward_kernel, triton.runtime.JITFunction):
        return _interpreted(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    device = device_of(arguments.device)
    if arguments.limit <= 0:
        raise ValueError(f"--limit: want seconds above 0, got {arguments.limit:g}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETED
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    file = RowFile(arguments.out, name, versions)
    selected = {Contender[name] for name in arguments.contenders} | {Contender.OURS}
    able = {contender for contender in Contender if runs_on(contender, device)}
    if arguments.small:
        planned = small_units()
    else:
        planned = list(units(list(cells(arguments.lengths, arguments.seeds))))
    chosen = [
        replace(unit, who=tuple(who for who in unit.who if who in able & selected or len(selected) == 1))
        for unit in planned
        if not arguments.cells or any(word in f"{unit.kind} {unit.cell.name}" for word in arguments.cells)
    ]
    left = go_on(chosen, file, device, limit_s=arguments.limit, seconds=arguments.seconds)
    result = record(file) | {"left": left}
    show(result, left)
    if arguments.json:
        print(json.dumps(result))
    return 1 if result["failed"] or any(bar["verdict"] == "OFF" for bar in result["bars"]) else 0


def _interpreted(argv: Sequence[str]) -> int:
    """Run the same in a process whose Triton interprets, which is decided at import."""
    command = [sys.executable, "-m", "experiments.bench.kernels", *argv]
    return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that all of it works")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no unit starts"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of whole launches"
    )
    parser.add_argument(
        "--cells", nargs="+", default=[], help="only cells with one of these words in their name"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=[],
        choices=[contender.name for contender in Contender],
        metavar="NAME",
    )
    parser.add_argument("--seeds", type=int, default=5, help="draws of each random mask")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, per contender and cell")
    parser.add_argument("--out", type=Path, help="JSON file of rows, from which a later call resumes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
