"""Measures a machine for the layers of plans: rows for `workbench.calibrate.fit`."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers

from runtime.measure.clock import Clock
from runtime.measure.executor import time_executor
from runtime.measure.layer_rows import rows_of
from runtime.measure.layers import time_window
from runtime.measure.microbench import Progress, Task, header_here, operator_tasks, run_tasks, wire_tasks
from runtime.measure.windows import Key, Window, windows_of
from runtime.measure.wires import Ring
from runtime.run_settings import TORCH_TYPE
from runtime.step.first_weights import DrawnWeights
from runtime.world.busy_cores import CoreWatch
from runtime.world.device import CPU
from runtime.world.pool import Place, Pool
from runtime.world.yardstick import Yardstick, one_thread
from workbench.calibrate.measurement import LayerRow, Measurement, OverheadRow, Row, YardstickRow
from workbench.model.trained import without_adapters
from workbench.plan.joint import replicas_apart
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Plan, Recompute
from workbench.schedule.action import COMPUTE

READING_S = 0.03  # per reading of the yardstick
BETWEEN = 5  # tasks between its readings


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Extent of a measurement.

    Args:
        concurrency: processes that run every layer at the same time, pinned where cores allow: as many as
            ranks will share the machine's memory.
        sizes: microbatches per module, from small to large.
        budget_s: per kind of pass and window; at least three rounds are timed.
        visits: how often every window is measured, with all others in between: a disturbance of some seconds
            then affects only one visit, and sizes of a layer stay in proportion.
        timeout_s: per job.
        device: on a GPU this process measures alone, and links between GPUs come from
            `torchrun -m runtime.measure.microbench`.
        drawn: cache of the weights of windows that this process measures alone; None: they are not kept.
    """

    concurrency: int = 1
    sizes: int = 3
    budget_s: float = 0.2
    visits: int = 1
    timeout_s: float = 120.0
    device: torch.device = CPU
    drawn: DrawnWeights | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "sizes", "visits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


def measure(
    plans: Sequence[Plan],
    pool: Pool | None,
    *,
    settings: BenchSettings | None = None,
    path: Path | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Measurement:
    """Measure the components of plans: layers, operators, messages, collectives, executor.

    Args:
        plans: layers and sizes of all are measured. The executor's overhead is measured on the first one (of
            those that one process can emulate, where it measures alone), and on others for passes that it
            lacks. All give sizes of gradient groups.
        pool: of at least as many workers as the first plan has ranks and `concurrency`; None: this
            process measures alone, without messages and collectives, as it must on a GPU.
        path: rows are written here as they come; existing rows are not measured again, so an interrupted
            run resumes.
        progress: called before each task and at the end.

    Raises:
        ValueError: no plan, a pool for a GPU, or a file of another machine or other software.
    """
    if not plans:
        raise ValueError("want at least one plan to measure, got none")
    chosen = settings or BenchSettings()
    if pool is not None and chosen.device.type != "cpu":
        raise ValueError(f"the workers of a pool have no {chosen.device}: it is measured by one process")
    header = header_here(chosen.device, [("transformers", transformers.__version__)])
    with one_thread():  # as in a rank
        return run_tasks(measuring_tasks(plans, pool, chosen), header, path=path, progress=progress)


def measuring_tasks(plans: Sequence[Plan], pool: Pool | None, settings: BenchSettings) -> list[Task]:
    """The tasks of `measure` in order; their names are unique."""
    tasks = distinct(_tasks(plans, pool, settings))
    return with_yardstick(tasks, pool, settings.device, settings.concurrency)


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, with numbers appended to repeated names."""
    numbered: list[Task] = []
    counts: Counter[str] = Counter()
    for task in tasks:
        counts[task.what] += 1
        count = counts[task.what]
        numbered.append(replace(task, what=f"{task.what} ({count})") if count > 1 else task)
    return numbered


def _tasks(plans: Sequence[Plan], pool: Pool | None, settings: BenchSettings) -> list[Task]:
    dtype = TORCH_TYPE[plans[0].settings.precision]
    tasks = operator_tasks(Clock(settings.device), dtype)
    if pool is not None:
        tasks = [_in_pool(task, index, dtype, pool, settings) for index, task in enumerate(tasks)]
        for size in _group_sizes(plans):
            ring = Ring(link="intra", processes=tuple(range(size)), process=0)
            alike = wire_tasks(Clock(), [ring], lambda _: True)
            tasks += [_among(task, index, size, pool, settings) for index, task in enumerate(alike)]
    able = plans if pool is not None else [plan for plan in plans if not shard_units(plan)]
    tasks += executor_tasks(able, pool, settings)
    return [*tasks, *layer_tasks(plans, pool, settings)]


def layer_tasks(plans: Sequence[Plan], pool: Pool | None, settings: BenchSettings) -> list[Task]:
    """A task per visit and new window of layers; pool None: this process measures alone.

    Windows that need more processes than there are are skipped, to be priced from others. Recomputation is
    timed where any of the plans uses it in the module. Layers are timed without their adapters, which a price
    adds.
    """
    recomputed = {
        settings.module
        for plan in plans
        for settings in plan.settings.modules
        if settings.recompute is not Recompute.NONE
    }
    windows: list[tuple[Plan, Window]] = []
    covered: set[Key] = set()
    num_processes = 1 if pool is None else pool.num_workers
    for plan in map(_without_adapters, map(replicas_apart, plans)):
        for window in windows_of(plan, sizes=settings.sizes):
            if window.num_processes > num_processes:
                continue
            if not covered.issuperset(window.keys(plan)):
                covered.update(window.keys(plan))
                windows.append((plan, replace(window, is_recomputed=window.module in recomputed)))
    return [
        _layer_task(*planned_window, visit, pool, settings)
        for visit in range(settings.visits)
        for planned_window in windows
    ]


def _without_adapters(plan: Plan) -> Plan:
    modules = (
        replace(module, layers=tuple(map(without_adapters, module.layers))) for module in plan.model.modules
    )
    return replace(plan, model=replace(plan.model, modules=tuple(modules)))


def _in_pool(task: Task, index: int, dtype: torch.dtype, pool: Pool, settings: BenchSettings) -> Task:
    """The task, run on one pinned worker instead of this process."""
    run = partial(pool.run, _operators_job, 1, index, dtype, timeout_s=settings.timeout_s)
    return replace(task, measure=lambda: run()[0])


def _operators_job(place: Place, index: int, dtype: torch.dtype) -> Sequence[Row]:
    del place
    return operator_tasks(Clock(), dtype)[index].measure()


def _among(task: Task, index: int, size: int, pool: Pool, settings: BenchSettings) -> Task:
    """The task, run on as many workers as the ring has processes."""
    run = partial(pool.run, _wires_job, size, index, timeout_s=settings.timeout_s)
    return replace(task, measure=lambda: run()[0])


def _wires_job(place: Place, index: int) -> Sequence[Row]:
    ring = Ring(link="intra", processes=tuple(range(place.size)), process=place.process)
    return wire_tasks(Clock(), [ring], lambda _: True)[index].measure()


def executor_tasks(plans: Sequence[Plan], pool: Pool | None, settings: BenchSettings) -> list[Task]:
    """Tasks for the executor's overhead: on the first plan, and on passes that no earlier plan has."""
    tasks: list[Task] = []
    covered: set[str] = set()
    for plan in plans:
        kinds = {str(action.kind) for program in plan.program.values() for action in program}
        new = {kind for kind in kinds if kind in COMPUTE} - covered
        if new and (pool is None or len(plan.ranks) <= pool.num_workers):
            tasks.append(_executor_task(plan, new if covered else kinds, pool, settings))
            covered |= new
    return tasks


def _executor_task(plan: Plan, kinds: Collection[str], pool: Pool | None, settings: BenchSettings) -> Task:
    passes = {kind for kind in kinds if kind in COMPUTE}

    def is_done(rows: Sequence[Row]) -> bool:
        return passes <= {row.action for row in rows if isinstance(row, OverheadRow)}

    def run() -> Sequence[Row]:
        return [row for row in time_executor(plan, pool, device=settings.device) if row.action in kinds]

    return Task(f"executor of {', '.join(sorted(passes))}", is_done, run)


def _layer_task(plan: Plan, window: Window, visit: int, pool: Pool | None, settings: BenchSettings) -> Task:
    keys = set(window.keys(plan))

    def is_done(rows: Sequence[Row]) -> bool:
        layer_rows = [row for row in rows if isinstance(row, LayerRow)]
        if window.is_recomputed and window.num_processes == 1:
            layer_rows = [row for row in layer_rows if row.recompute_forward_s is not None]
        counts = Counter(map(_key_of, layer_rows))
        return all(counts[key] > visit for key in keys)

    def run() -> Sequence[Row]:
        if pool is None:
            place = Place(0, 1, lambda position: None)
            device = str(settings.device)
            times = [time_window(place, plan, window, settings.budget_s, device, settings.drawn)]
            return list(rows_of(plan, window, times))
        times = pool.run(
            time_window,
            window.num_processes if window.num_processes > 1 else settings.concurrency,
            plan,
            window,
            settings.budget_s,
            timeout_s=settings.timeout_s,
        )
        return list(rows_of(plan, window, times))

    first, last = window.layers
    shared = f" on {window.num_processes} ranks" if window.num_processes > 1 else ""
    what = f"{window.module}[{first}:{last}], {window.num_rows} x {window.row.tokens_in} tokens{shared}"
    return Task(what, is_done, run)


def _key_of(row: LayerRow) -> Key:
    grid = row.tp, row.cp, row.ep, row.sequence_parallel
    return row.signature, row.precision, *grid, row.rows, row.tokens_in, row.attention_area


def _group_sizes(plans: Sequence[Plan]) -> list[int]:
    """Two, for messages, and the numbers of ranks that reduce a gradient or shard weights in any plan."""
    sizes = {2, *(len(group.ranks) for plan in plans for group in lower(plan).groups)}
    units = (unit for plan in plans for unit in shard_units(plan))
    sizes |= {len(ranks) for unit in units for ranks in (*unit.holders, *unit.expert_holders)}
    return sorted(size for size in sizes if size > 1)


def with_yardstick(
    tasks: Sequence[Task], pool: Pool | None, device: torch.device, num_processes: int
) -> list[Task]:
    """The tasks, with readings of the yardstick before the first, after every few and at the end.

    Args:
        pool: its first processes read it at the same time; None: this process reads it alone.
    """
    reader = _Reader(pool, device, num_processes)
    interleaved: list[Task] = []
    for first in range(0, len(tasks), BETWEEN):
        interleaved += [reader.task(first // BETWEEN), *tasks[first : first + BETWEEN]]
    return [*interleaved, reader.task(-(-len(tasks) // BETWEEN))]


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
        """Mean readings, as beside steps: medians would leave out pauses, which would look like drift."""
        if self._pool is None:
            return [Yardstick(self._device).read(READING_S)]
        return self._pool.run(_read_s, self._num_processes)


def _read_s(place: Place) -> float:
    del place
    return Yardstick(torch.device("cpu")).read(READING_S)
