"""Reads the yardstick among the tasks of a calibration, and who else was at work meanwhile."""

from collections.abc import Sequence

import torch

from runtime.measure.microbench import Task
from runtime.world.busy_cores import CoreWatch
from runtime.world.pool import Place, Pool
from runtime.world.yardstick import Yardstick
from workbench.calibrate.measurement import Row, YardstickRow

BUDGET_S = 0.03
BETWEEN = 5  # tasks


def with_yardstick(
    tasks: Sequence[Task], pool: Pool | None, device: torch.device, num_processes: int
) -> list[Task]:
    """The tasks, with a reading before the first, after every few and at the end.

    Args:
        pool: whose first processes read it at once; None: this one does, alone.
    """
    reader = _Reader(pool, device, num_processes)
    found: list[Task] = []
    for first in range(0, len(tasks), BETWEEN):
        found += [reader.task(first // BETWEEN), *tasks[first : first + BETWEEN]]
    return [*found, reader.task(-(-len(tasks) // BETWEEN))]


class _Reader:
    def __init__(self, pool: Pool | None, device: torch.device, num_processes: int) -> None:
        self._pool, self._device = pool, device
        self._num_processes = 1 if pool is None else num_processes
        self._watch = self._new_watch()

    def task(self, index: int) -> Task:
        def is_done(rows: Sequence[Row]) -> bool:
            return sum(isinstance(row, YardstickRow) for row in rows) > index

        return Task(f"yardstick, reading {index + 1}", is_done, lambda: (self._row(),))

    def _row(self) -> YardstickRow:
        busy, self._watch = self._watch.busy(), self._new_watch()
        return YardstickRow(
            seconds=max(self._readings_s()),
            num_processes=self._num_processes,
            others_cores=None if busy is None else busy.others,
        )

    def _new_watch(self) -> CoreWatch:
        return CoreWatch(tuple if self._pool is None else self._pool.all_process_ids)

    def _readings_s(self) -> list[float]:
        """Means of turns, as beside steps: medians leave out the stops, which would pass for drift there."""
        if self._pool is None:
            return [Yardstick(self._device).read(BUDGET_S)]
        return self._pool.run(_read_s, self._num_processes)


def _read_s(place: Place) -> float:
    del place
    return Yardstick(torch.device("cpu")).read(BUDGET_S)
