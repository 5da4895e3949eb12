"""Part: the attention kernels and, in turns, FlexAttention, cuDNN, flash and our other backwards."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from experiments.bench.kernel_bars import least_ratios
from experiments.bench.kernel_cells import Contender
from experiments.bench.kernel_rows import BITS, PLAN, KernelRow
from experiments.bench.kernel_turns import Unit, event_clock, host_clock, unit_rows
from experiments.bench.kernels import cells as launches
from experiments.bench.kernels import small_units, units
from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from runtime.world.device import device_of

LENGTHS = (16384, 65536)
WHOLE = "full"  # kind of a unit: all queries of a mask
SECONDS = {Extent.FULL: 0.7, Extent.SMALL: 0.01}  # of measuring, per contender
TYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
BOUND_S = 90.0
OURS = Contender.OURS.name
BACKWARDS = (Contender.DETERMINISTIC, Contender.ENGINE)  # ours in other ways


def cells(session: Session) -> tuple[Cell, ...]:
    """Whole launches beside rivals, then how long plans take, and whether bits repeat.

    Variants of ours, other widths and ranks are `experiments.bench.kernels`' own.
    """
    return tuple(Cell(name, BOUND_S) for name in _units(session))


def _units(session: Session) -> dict[str, Unit]:
    """By name; on a CPU, where nothing is judged and FlexAttention starts slowly, one without it."""
    is_small = session.extent is Extent.SMALL
    all_units = small_units() if is_small else list(units(list(launches(LENGTHS, seeds=1))))
    whole = [unit for unit in all_units if unit.kind == WHOLE and Contender.FLEX in unit.who]
    if session.device == "cpu":
        chosen = [replace(whole[0], who=(Contender.OURS, Contender.FLASH))]
    else:
        whole = [replace(unit, who=(*unit.who, *BACKWARDS)) for unit in whole]
        chosen = [*whole, *(unit for unit in all_units if unit.kind in (PLAN, BITS))]
    return {_name(unit): unit for unit in chosen}


def _name(unit: Unit) -> str:
    return f"{unit.kind} {unit.cell.name} {' '.join(each.name for each in unit.who)}"


def measure(session: Session, key: str) -> Measured:
    """Medians and spreads of each contender's forward and backward.

    Raises:
        ValueError: ours did not run or computes something else; what a rival raises is kept in its row.
    """
    unit = _units(session)[key]
    device = device_of(session.device)
    clock = event_clock(device) if device.type == "cuda" else host_clock
    rows = unit_rows(unit, device, TYPES[device.type], clock, SECONDS[session.extent])
    failed = next((row for row in rows if row.error is not None and row.who in (OURS, "DETERMINISTIC")), None)
    if failed is not None:
        raise ValueError(f"{failed.direction} of {failed.who}: {failed.error}")
    return Measured({"rows": [asdict(row) for row in rows]}, *_note(rows))


def _note(rows: list[KernelRow]) -> tuple[str, float | None]:
    """Rivals' times over ours, and our rate."""
    ours = {row.direction: row.seconds for row in rows if row.who == OURS}
    ratios = [
        f"{row.who} {row.direction} {row.seconds / mine:.2f}"
        for row in rows
        if row.who != OURS and row.seconds is not None and (mine := ours.get(row.direction)) is not None
    ]
    rates = [row.flop / row.seconds for row in rows if row.who == OURS and row.flop and row.seconds]
    rate = max(rates, default=None)
    note = ", ".join([] if rate is None else [f"{rate / 1e12:.4g} TFLOP/s"])
    return (f"{note}; rivals take times {', '.join(ratios)}" if ratios else note), rate


def ratios(session: Session, values: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The smallest ratios that the goals speak of; None where not measured, and of an interpreter never."""
    if session.device == "cpu":
        return least_ratios(())
    rows = [KernelRow(**row) for measured in values.values() for row in measured["rows"]]
    return least_ratios(rows)
