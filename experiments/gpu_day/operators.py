"""Part: products, attention, copies, which price layers that were not measured themselves."""

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

# What a call of two minutes has time for; `runtime.measure.microbench` measures the rest.
PRODUCTS = tuple(
    (m, n, k)
    for m in (16, 64, 256, 1024, 4096, 16384)
    for n in (1024, 2048, 4096, 8192)
    for k in (1024, 2048, 4096, 8192)
)
MOVED_BYTES = tuple(2**i for i in range(16, 31, 2))
LENGTHS = (1024, 8192)  # tokens of attention's short calls
LOOP_LENGTHS = (1024, 4096)  # of its long loops
HEAD_DIMS = (64, 72, 128)  # of these: those of the plans' modules, and the kernels' own
LOOP_S = 0.5


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
    cells_of_operators = operator_cells(device, PRECISION[session.device], _sizes(session, device))
    return {cell.key: cell for cell in cells_of_operators}


def _sizes(session: Session, device: torch.device) -> CellSizes:
    sizes = cell_sizes(device)
    if session.extent is Extent.FULL:
        return CellSizes(
            short=replace(sizes.short, products=PRODUCTS, moved_bytes=MOVED_BYTES),
            attention=replace(sizes.attention, lengths=LENGTHS),
            sustained=replace(sizes.sustained, lengths=LOOP_LENGTHS, head_dims=HEAD_DIMS, loop_s=LOOP_S),
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
