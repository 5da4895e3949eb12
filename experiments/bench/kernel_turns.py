"""Contenders of the kernel benchmark take turns on one cell: medians and spreads, or the reason for none."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.bench.kernel_cells import (
    OPTIONS,
    Attention,
    Cell,
    Contender,
    Stage,
    attention_of,
    built_flex_mask,
    has_backward,
    set_up,
)
from experiments.bench.kernel_rows import BITS, PLAN, KernelRow
from runtime.kernels.bitfield_attention.launch import resident_tasks
from runtime.kernels.bitfield_attention.plan import make_plan
from runtime.kernels.bitfield_attention.tasks import make_tasks, modelled_span
from runtime.kernels.bitfield_attention.tilings import Pass, tiling
from runtime.measure.clock import quartile_spread

LEAST_ROUNDS, MOST_ROUNDS = 5, 50
PLAN_ROUNDS = 10
SAME_BITS_RUNS = 5
FLUSH_BYTES = 256 * 2**20
AHEAD_CYCLES = 2_000_000  # of a GPU, a millisecond: what the host has to issue a call before it counts
PARITY = 2e-2  # of outputs of two bf16 kernels, norm of the difference over norm
LONGEST_ERROR = 300  # characters

Clock = Callable[[Callable[[], object]], float]


def event_clock(device: torch.device) -> Clock:
    """Return a clock of device seconds between two events, with a flushed L2 cache and the host ahead."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def clock(call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    return clock


def host_clock(call: Callable[[], object]) -> float:
    """Measure a call in host seconds, for what runs on the CPU."""
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


@dataclass(frozen=True, slots=True)
class Unit:
    """Contenders measured together on one cell; the first one is ours."""

    kind: str
    cell: Cell
    who: tuple[Contender, ...]


def directions(unit: Unit, who: Contender, device: torch.device) -> tuple[str, ...]:
    """The passes measured for a contender."""
    if unit.kind in (PLAN, BITS):
        return (unit.kind,)
    return ("forward", "backward") if has_backward(who, device) else ("forward",)


def row_of(unit: Unit, dtype: torch.dtype, direction: str, who: Contender, **measured: Any) -> KernelRow:
    """Make a row; without `measured` only its key is meaningful."""
    cell = unit.cell
    return KernelRow(
        kind=unit.kind,
        mask=cell.mask,
        length=cell.length,
        head_dim=cell.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        seed=cell.seed,
        direction=direction,
        who=who.name,
        **measured,
    )


def unit_rows(
    unit: Unit, device: torch.device, dtype: torch.dtype, clock: Clock, seconds: float
) -> list[KernelRow]:
    """Measure a unit; a contender that fails or computes something else gets a row with its error."""
    stage = set_up(unit.cell, device, dtype)
    if unit.kind == PLAN:
        return _plan_rows(unit, stage, clock)
    if unit.kind == BITS:
        return _bit_rows(unit, stage)
    able, rows = [], []
    for contender in unit.who:
        try:
            measure(unit, stage, [unit.who[0], contender], _no_clock, seconds=0.0)
            able.append(contender)
        except Exception as error:  # whatever a compiler or a library raises is that contender's result
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_ERROR]
            passes = directions(unit, contender, device)
            rows += [row_of(unit, dtype, direction, contender, error=line) for direction in passes]
    return rows + (measure(unit, stage, able, clock, seconds) if able else [])


def measure(
    unit: Unit, stage: Stage, who: Sequence[Contender], clock: Clock, seconds: float
) -> list[KernelRow]:
    """Measure all contenders' passes in turns, for about `seconds` each.

    Raises:
        ValueError: a contender's output is not that of the first one.
    """
    inputs = {contender: _inputs(contender, stage) for contender in who}
    runs = {contender: attention_of(contender, stage) for contender in who}
    outputs: dict[Contender, Tensor] = {}
    for contender in who:
        outputs[contender] = first_run(runs[contender], inputs[contender], stage.do)
        _check_parity(contender, outputs[contender].detach(), outputs[who[0]].detach(), stage.cell)
    times_s: dict[tuple[Contender, str], list[float]] = {
        (contender, direction): []
        for contender in who
        for direction in directions(unit, contender, stage.q.device)
    }
    begin = time.perf_counter()
    least = LEAST_ROUNDS if stage.q.is_cuda else 1
    for done in range(MOST_ROUNDS):
        if done >= least and time.perf_counter() - begin > seconds * len(who):
            break
        for contender in who:
            times_s[contender, "forward"].append(clock(partial(runs[contender], *inputs[contender])))
            if outputs[contender].requires_grad:
                backward = _gradient(outputs[contender], inputs[contender], stage.do)
                times_s[contender, "backward"].append(clock(backward))
    return [
        row_of(
            unit,
            stage.q.dtype,
            direction,
            contender,
            seconds=statistics.median(times),
            spread=quartile_spread(times),
            flop=stage.forward_flop,
            modelled=_modelled(stage) if (contender, direction) == (Contender.OURS, "forward") else None,
        )
        for (contender, direction), times in times_s.items()
    ]


def _inputs(who: Contender, stage: Stage) -> list[Tensor]:
    trained = has_backward(who, stage.q.device)
    return [x.detach().requires_grad_(trained) for x in (stage.q, stage.k, stage.v)]


def first_run(run: Attention, inputs: list[Tensor], do: Tensor) -> Tensor:
    """Run a first forward, and a backward if there is one, so that everything is compiled."""
    out = run(*inputs)
    if out.requires_grad:
        torch.autograd.grad(out, inputs, do, retain_graph=True)
    return out


def _gradient(out: Tensor, inputs: list[Tensor], do: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, inputs, do, retain_graph=True)


def _check_parity(who: Contender, out: Tensor, other: Tensor, cell: Cell) -> None:
    error = float((out.float() - other.float()).norm() / other.float().norm())
    if not error <= PARITY:
        raise ValueError(f"{cell.name}: output of {who.value} is {error:.2e} off, want <= {PARITY}")


def _modelled(stage: Stage) -> float:
    """List-scheduling time of our forward, in units of one FULL tile."""
    q, lists, plan = stage.q, stage.plan.rows, stage.plan
    tile = tiling(Pass.FORWARD, q.shape[-1], q.dtype, q.device, plan.block_q, plan.block_k)
    num_heads = q.shape[1] * (plan.block_q // tile.block_m)
    num_slots = resident_tasks(q.device, tile.num_warps)
    split = OPTIONS[Contender.OURS].split
    tasks = make_tasks(
        lists.num_full, lists.num_partial, num_heads=num_heads, num_slots=num_slots, split=split
    )
    return modelled_span(tasks, lists.num_full, lists.num_partial, num_heads=num_heads, num_slots=num_slots)


def _no_clock(_call: Callable[[], object]) -> float:
    return 0.0


def _plan_rows(unit: Unit, stage: Stage, clock: Clock) -> list[KernelRow]:
    """Time making the plan of a mask whose folded words are on the device: ours and FlexAttention's."""
    rows = []
    for contender, make in ((Contender.OURS, make_plan), (Contender.FLEX, built_flex_mask)):
        make(stage.mask)
        times = [clock(partial(make, stage.mask)) for _ in range(PLAN_ROUNDS)]
        summary = {"seconds": statistics.median(times), "spread": quartile_spread(times)}
        rows.append(row_of(unit, stage.q.dtype, PLAN, contender, **summary))
    return rows


def _bit_rows(unit: Unit, stage: Stage) -> list[KernelRow]:
    """Check that runs of the deterministic mode are bitwise equal; if not, the row has an error."""
    attention = attention_of(Contender.DETERMINISTIC, stage)
    runs = []
    for _ in range(SAME_BITS_RUNS):
        inputs = [x.detach().requires_grad_() for x in (stage.q, stage.k, stage.v)]
        out = attention(*inputs)
        runs.append((out, *torch.autograd.grad(out, inputs, stage.do)))
    equal = all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))
    error = None if equal else "runs differ in their bits"
    return [row_of(unit, stage.q.dtype, BITS, Contender.DETERMINISTIC, error=error)]
