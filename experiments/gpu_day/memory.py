"""Predicted peak memory of plans of one rank, compared with the allocator's."""

from experiments.gpu_day.campaign import Cell, Measured, Session
from experiments.gpu_day.jobs import DRAWN, on_one_rank
from runtime.emulation.peak_memory import peak_memory
from runtime.run_settings import RunSettings
from runtime.world.device import device_of
from workbench.plan.codec import plan_hash
from workbench.timing.accept import accept
from workbench.units import gib

BOUND_S = 240.0


def cells(session: Session) -> tuple[Cell, ...]:
    """One for each plan."""
    return tuple(Cell(named.name, BOUND_S) for named in on_one_rank(session))


def measure(session: Session, key: str) -> Measured:
    """Predicted and measured bytes of one plan.

    Raises:
        ValueError: it does not fit.
    """
    named = next(named for named in on_one_rank(session) if named.name == key)
    lowered, _ = accept(named.plan)
    peak = peak_memory(lowered, RunSettings(), device=device_of(session.device), drawn=DRAWN)
    values = {
        "plan": named.name,
        "plan_hash": plan_hash(named.plan),
        "predicted_bytes": peak.predicted_bytes,
        "measured_bytes": peak.measured_bytes,
        "error": peak.error,
    }
    note = f"{peak.error:+.2%} of {gib(peak.measured_bytes):.3g} GiB"
    return Measured(values, note, -abs(peak.error))
