"""Part: products, attention, copies: what prices layers that nobody has measured."""

from dataclasses import replace
from functools import cache

import torch

from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from experiments.gpu_day.environment import PRECISION, facts
from experiments.gpu_day.profile import HEADER
from runtime.measure import cells as operators
from runtime.measure.cells import CellSizes, cell_sizes, operator_cells
from runtime.measure.clock import Clock
from runtime.world.device import device_of
from workbench.calibrate.measurement import row_values

# What a day of a quarter of an hour has time for; `runtime.measure.microbench` measures the rest.
LONGEST = 16384  # tokens of attention's short calls
HEAD_DIMS = (64, 72, 128)  # of attention's long loops: those of the plans' modules, and the kernels' own


def cells(session: Session) -> tuple[Cell, ...]:
    """The header, then every operator."""
    return (Cell(HEADER), *(Cell(name, bound_s=300.0) for name in _operators(session)))


def measure(session: Session, key: str) -> Measured:
    """The rows of one operator."""
    if key == HEADER:
        return Measured(facts(session))
    clock = Clock(device_of(session.device))
    rows = [row_values(row) for row in _operators(session)[key].measure(clock)]
    return Measured({"rows": rows}, f"{len(rows)} rows")


@cache
def _operators(session: Session) -> dict[str, operators.Cell]:
    """By name, in order."""
    device = device_of(session.device)
    found = operator_cells(device, PRECISION[session.device], _sizes(session, device))
    return {cell.key: cell for cell in found}


def _sizes(session: Session, device: torch.device) -> CellSizes:
    sizes = cell_sizes(device)
    if session.extent is Extent.FULL:
        lengths = tuple(length for length in sizes.attention.lengths if length <= LONGEST)
        return replace(
            sizes,
            attention=replace(sizes.attention, lengths=lengths),
            sustained=replace(sizes.sustained, head_dims=HEAD_DIMS),
        )
    return CellSizes(
        short=replace(
            sizes.short, products=((64, 64, 64), (64, 128, 64), (128, 128, 128)), moved_bytes=(2**14, 2**16)
        ),
        attention=replace(sizes.attention, lengths=(128,), heads=sizes.attention.heads[:1]),
        sustained=replace(
            sizes.sustained,
            products=((64, 128, 64),),
            lengths=(64,),
            tokens=64,
            cache_bytes=2**16,
            head_dims=(64,),
            loop_s=0.005,
        ),
    )
