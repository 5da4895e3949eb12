"""Bitfield attention against FlexAttention and SDPA on one GPU: bars K1 to K13 in one run.

Setup:   bf16, batch 1, 32 query and 8 key/value heads of width 128; causal, EP, EE and MP masks from
         fixed seeds; one rank of 8 with one key/value head; widths 64 and 256. Contenders of a cell take
         turns on the same tensors with the L2 cache flushed between them; the median counts. FLOP by
         exact mask area, never by blocks; the backward counts 2.5 forwards. Every rival's mask is made
         ahead; making it is timed apart (K7).
Run:     python -m experiments.bench.kernels [--json] [--lengths 16384 ...] [--cells WORD ...]
         [--contenders NAME ...] [--seeds N] [--seconds S] [--out PATH]
         Without a GPU it prints "no GPU" and exits 0.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from experiments.bench.kernel_bars import Bar, Timing, bars, simulated_forwards
from experiments.bench.kernel_cells import (
    MASKS,
    OPTIONS,
    Cell,
    Contender,
    Stage,
    attention_of,
    flex_mask,
    has_flash_backend,
    set_up,
)
from runtime.attention_mask import token_fields
from runtime.kernels.bitfield_attention.launch import resident_tasks
from runtime.kernels.bitfield_attention.mask import kernel_mask
from runtime.kernels.bitfield_attention.plan import make_plan
from runtime.kernels.bitfield_attention.tasks import modelled_span
from runtime.kernels.bitfield_attention.tilings import Pass, tiling

LENGTHS = (16384, 32768, 65536)
WIDTH_LENGTH = 16384
LOCAL_LENGTH = 65536
LEAST_ROUNDS, MOST_ROUNDS = 5, 50
FLUSH_BYTES = 256 * 2**20
PARITY = 2e-2  # of outputs of two bf16 kernels, norm of the difference over norm

Clock = Callable[[Callable[[], object]], float]


def event_clock(device: torch.device) -> Clock:
    """Seconds on the device between two events, the L2 cache flushed before the first."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def clock(call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    return clock


def cells(lengths: Sequence[int], seeds: int) -> Iterator[tuple[str, Cell]]:
    """(kind, cell), cheap ones first."""
    for head_dim in (64, 256):
        for mask in MASKS:
            yield f"hd{head_dim}", Cell(mask, WIDTH_LENGTH, head_dim=head_dim)
    for group in (4, 1):
        for mask in ("EE", "MP"):
            for seed in range(seeds):
                yield f"cp g={group}", Cell(mask, LOCAL_LENGTH, heads=group, kv_heads=1, ranks=8, seed=seed)
    for length in lengths:
        for mask in MASKS:
            for seed in range(1 if mask == "causal" else seeds):
                yield "full", Cell(mask, length, seed=seed)


def contenders_of(kind: str, cell: Cell) -> list[Contender]:
    """Who runs a cell. SDPA knows causal alone; max-autotune compiles for minutes, so it skips widths."""
    plain = [Contender.FLEX, Contender.OURS, Contender.WHOLE, Contender.DETERMINISTIC]
    if kind == "full":
        plain += [Contender.FLEX_TUNED, Contender.FIXED, Contender.PUBLISHED]
        plain += [Contender.FLEX_FLASH] if has_flash_backend() else []
        if cell.mask == "causal":
            plain += [Contender.FLASH, Contender.CUDNN]
    elif kind.startswith("cp"):
        plain += [Contender.FIXED, Contender.PUBLISHED]
    return plain


def measure(kind: str, stage: Stage, who: Sequence[Contender], clock: Clock, seconds: float) -> list[Timing]:
    """Medians of all contenders, taking turns for about `seconds` each.

    Raises:
        ValueError: a contender's output is not that of the first one.
    """
    inputs = [x.detach().requires_grad_() for x in (stage.q, stage.k, stage.v)]
    runs = {each: attention_of(each, stage) for each in who}
    outputs: dict[Contender, Tensor] = {}
    for each, run in runs.items():
        outputs[each] = run(*inputs)
        _check_parity(each, outputs[each].detach(), outputs[who[0]].detach(), stage.cell)
        torch.autograd.grad(outputs[each], inputs, stage.do, retain_graph=True)
    forward: dict[Contender, list[float]] = {each: [] for each in who}
    backward: dict[Contender, list[float]] = {each: [] for each in who}
    begin = time.perf_counter()
    for done in range(MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() - begin > seconds * len(who):
            break
        for each in who:
            forward[each].append(clock(lambda run=runs[each]: run(*inputs)))  # type: ignore[misc]
            gradient = _gradient(outputs[each], inputs, stage.do)
            backward[each].append(clock(gradient))
    return [
        Timing(
            mask=stage.cell.mask,
            length=stage.cell.length,
            kind=kind,
            seed=stage.cell.seed,
            who=each,
            forward_s=statistics.median(forward[each]),
            backward_s=statistics.median(backward[each]),
            forward_flop=stage.forward_flop,
            modelled=_modelled(stage) if each is Contender.OURS else None,
        )
        for each in who
    ]


def _gradient(out: Tensor, inputs: list[Tensor], do: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, inputs, do, retain_graph=True)


def _check_parity(who: Contender, out: Tensor, other: Tensor, cell: Cell) -> None:
    error = float((out.float() - other.float()).norm() / other.float().norm())
    if not error <= PARITY:
        raise ValueError(f"{cell.name}: output of {who.value} is {error:.2e} off, want <= {PARITY}")


def _modelled(stage: Stage) -> float:
    """List-scheduling time of our forward, in units of one FULL tile."""
    q, plan = stage.q, stage.plan
    tile = tiling(Pass.FORWARD, q.shape[-1], q.dtype, q.device, plan.block_q, plan.block_k)
    return modelled_span(
        plan.rows.num_full,
        plan.rows.num_partial,
        num_heads=q.shape[1] * (plan.block_q // tile.block_m),
        num_slots=resident_tasks(q.device, tile.num_warps),
        split=OPTIONS[Contender.OURS].split,
    )


def extras(device: torch.device, clock: Clock, length: int = 65536) -> dict[str, float]:
    """Plan times of an EE mask of `length` tokens, and whether the deterministic mode repeats its bits.

    Both plans start from token fields that lie on the device already.
    """
    fields = token_fields(MASKS["EE"](length, 0), device)
    mask = kernel_mask(fields, fields)
    flex_mask(mask)
    make_plan(mask)
    ours = [clock(lambda: make_plan(kernel_mask(fields, fields))) for _ in range(10)]
    flex = [clock(lambda: flex_mask(mask)) for _ in range(10)]
    stage = set_up(Cell("EE", min(length, WIDTH_LENGTH)), device)
    attention = attention_of(Contender.DETERMINISTIC, stage)
    runs = []
    for _ in range(5):
        inputs = [x.detach().requires_grad_() for x in (stage.q, stage.k, stage.v)]
        out = attention(*inputs)
        runs.append((out, *torch.autograd.grad(out, inputs, stage.do)))
    equal = all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))
    return {
        "plan_s": statistics.median(ours),
        "flex_plan_s": statistics.median(flex),
        "equal_bits": float(equal),
    }


def describe(timing: Timing) -> str:
    """One line of the table."""
    rate = timing.forward_flop / timing.forward_s / 1e12
    line = (
        f"{timing.kind:7s} {timing.mask:6s} {timing.length // 1024:3d}k #{timing.seed} "
        f"{timing.who.value:58s} {timing.forward_s * 1e3:9.3f} ms {rate:6.1f} TFLOP/s"
    )
    if timing.backward_s is None:
        return line
    backward_rate = 2.5 * timing.forward_flop / timing.backward_s / 1e12
    return f"{line} {timing.backward_s * 1e3:9.3f} ms {backward_rate:6.1f} TFLOP/s"


def record(timings: Sequence[Timing], extra: dict[str, float], judged: Sequence[Bar]) -> dict[str, Any]:
    """What `--json` prints and `--out` keeps."""
    return {
        "script": "experiments.bench.kernels",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "date": time.strftime("%Y-%m-%d"),
        "bars": [{**asdict(bar), "verdict": bar.verdict} for bar in judged],
        "extra": extra,
        "simulated": [asdict(row) for row in simulated_forwards(timings)],
        "timings": [{**asdict(timing), "who": timing.who.value} for timing in timings],
    }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU")
        return 0
    device = torch.device("cuda")
    torch._dynamo.config.cache_size_limit = 1000  # every cell compiles its own FlexAttention
    torch._functorch.config.donated_buffer = False  # a backward runs many times over one graph
    clock = event_clock(device)
    wanted = {Contender[name] for name in arguments.contenders} or set(Contender)
    timings: list[Timing] = []
    extra = extras(device, clock)
    for kind, cell in cells(arguments.lengths, arguments.seeds):
        if arguments.cells and not any(word in f"{kind} {cell.name}" for word in arguments.cells):
            continue
        who = [each for each in contenders_of(kind, cell) if each in wanted]
        for timing in measure(kind, set_up(cell, device), who, clock, arguments.seconds):
            timings.append(timing)
            print(describe(timing), flush=True)
        torch._dynamo.reset()
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record(timings, extra, bars(timings, extra)), indent=1))
    judged = bars(timings, extra)
    for bar in judged:
        value = "-" if bar.value is None else f"{bar.value:.4g}"
        print(
            f"{bar.key:10s} {bar.meaning:66s} {value:>9s} "
            f"{'<=' if bar.at_most else '>='} {bar.must:g} {bar.verdict}"
        )
    for row in simulated_forwards(timings):
        print(
            f"simulated {row.kind:7s} {row.mask:6s} {row.length // 1024:3d}k {row.simulated_s * 1e3:9.3f} "
            f"ms, measured {row.measured_s * 1e3:9.3f} ms, error {row.error:+.1%}"
        )
    if arguments.json:
        print(json.dumps(record(timings, extra, judged)))
    return 1 if any(bar.verdict == "OFF" for bar in judged) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of whole launches"
    )
    parser.add_argument(
        "--cells", nargs="+", default=[], help="only cells with one of these words in their name"
    )
    parser.add_argument(
        "--contenders", nargs="+", default=[], choices=[each.name for each in Contender], metavar="NAME"
    )
    parser.add_argument("--seeds", type=int, default=5, help="draws of each random mask")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, per contender and cell")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every cell")
    return parser


if __name__ == "__main__":
    sys.exit(main())
