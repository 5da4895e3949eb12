"""Part: measurements of a single rank: the peak memory of plans, and a world of one."""

from experiments.gpu_day import memory, world
from experiments.gpu_day.campaign import Cell, Measured, Session

PARTS = {"memory": memory, "world": world}


def cells(session: Session) -> tuple[Cell, ...]:
    """Peaks of memory, then worlds."""
    return tuple(
        Cell(f"{name}: {cell.key}", cell.bound_s)
        for name, module in PARTS.items()
        for cell in module.cells(session)
    )


def measure(session: Session, key: str) -> Measured:
    """One of them; errors as of the module that measures it."""
    name, _, inner = key.partition(": ")
    return PARTS[name].measure(session, inner)
