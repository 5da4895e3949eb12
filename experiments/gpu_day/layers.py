"""Part: the layers of the plans and the executor, on which the plans' predictions are based."""

from functools import cache

from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from experiments.gpu_day.environment import facts
from experiments.gpu_day.jobs import DRAWN, judged, rehearsed
from experiments.gpu_day.profile import HEADER
from runtime.measure.microbench import Task
from runtime.measure.plans import BenchSettings, distinct, executor_tasks, layer_tasks
from runtime.world.device import device_of
from workbench.calibrate.measurement import row_values

VISITS = {Extent.FULL: 2, Extent.SMALL: 1}  # what sways for some seconds falls on one of them
BUDGET_S = {Extent.FULL: 0.15, Extent.SMALL: 0.01}
SIZES = {Extent.FULL: 3, Extent.SMALL: 2}  # microbatches of each module that layers are measured on


def cells(session: Session) -> tuple[Cell, ...]:
    """The header, the executor, then every window of layers of all plans of the job."""
    return (Cell(HEADER), *(Cell(name, bound_s=300.0) for name in _tasks(session)))


def measure(session: Session, key: str) -> Measured:
    """The rows of one task."""
    if key == HEADER:
        return Measured(facts(session))
    rows = [row_values(row) for row in _tasks(session)[key].measure()]
    return Measured({"rows": rows}, f"{len(rows)} rows")


@cache
def _tasks(session: Session) -> dict[str, Task]:
    """By name, in order."""
    plans = [named.plan for named in (*rehearsed(session), *judged(session))]
    settings = BenchSettings(
        sizes=SIZES[session.extent],
        budget_s=BUDGET_S[session.extent],
        device=device_of(session.device),
        visits=VISITS[session.extent],
        drawn=DRAWN,
    )
    tasks = distinct([*executor_tasks(plans, None, settings), *layer_tasks(plans, None, settings)])
    return {task.what: task for task in tasks}
