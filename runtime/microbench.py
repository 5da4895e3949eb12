"""Measures this machine for the layers of a plan: rows for `workbench.calibrate.fit`."""

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from runtime.bench_layers import Point, points_of, rows_of, time_point
from runtime.bench_machine import (
    time_copies,
    time_executor,
    time_messages,
    time_products,
    time_reductions,
)
from runtime.pool import Pool
from workbench.calibrate.measurement import (
    CollectiveRow,
    CopyRow,
    Header,
    LayerRow,
    LinkRow,
    MatmulRow,
    Measurement,
    OverheadRow,
    Row,
    read_measurement,
    write_measurement,
)
from workbench.plan.lower import lower
from workbench.plan.plan import Plan

Progress = Callable[[int, int, str], None]  # (done, total, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """How much is measured.

    Args:
        concurrency: processes that run every layer at the same time, each pinned where cores
            allow: as many as ranks will share the machine's memory.
        sizes: microbatches per module, from small to large.
        budget_s: of each kind of pass of each point; three calls are timed at least.
        timeout_s: of each job.
    """

    concurrency: int = 1
    sizes: int = 3
    budget_s: float = 0.15
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("concurrency", "sizes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class _Task:
    what: str
    is_done: Callable[[Sequence[Row]], bool]
    measure: Callable[[], list[Row]]


def measure(
    plans: Sequence[Plan],
    pool: Pool,
    *,
    settings: BenchSettings | None = None,
    path: Path | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Measurement:
    """Measure what the plans are made of: layers, messages, all-reduces, optimizer, executor.

    Args:
        plans: layers and sizes of all are measured; the first one's ranks give the executor's
            overhead and the sizes of gradient groups.
        pool: of at least as many workers as the first plan has ranks and `concurrency`.
        path: rows are written here as they come; rows that it already holds are not measured
            again, so an interrupted run goes on where it was. Rows made with another machine
            or software are refused.
        progress: called before each task and at the end.

    Raises:
        ValueError: no plan, or a file of another machine or software.
    """
    if not plans:
        raise ValueError("want at least one plan to measure, got none")
    chosen = settings or BenchSettings()
    header = header_here()
    rows: list[Row] = list(_known_rows(path, header))
    tasks = _tasks(plans, pool, chosen)
    for done, task in enumerate(tasks):
        progress(done, len(tasks), task.what)
        if not task.is_done(rows):
            rows += task.measure()
            if path is not None:
                write_measurement(Measurement(header, tuple(rows)), path)
    progress(len(tasks), len(tasks), "measured")
    return Measurement(header, tuple(rows))


def header_here() -> Header:
    """This machine and its software."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Header(
        device="cpu",
        device_name=_processor_name(),
        memory_bytes=pages * page_bytes,
        num_threads=1,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        clocks="unlocked",
        versions=tuple(sorted(versions.items())),
    )


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _known_rows(path: Path | None, header: Header) -> Sequence[Row]:
    if path is None or not path.is_file():
        return ()
    known = read_measurement(path)
    for name in ("device", "device_name", "num_threads", "versions"):
        ours, theirs = getattr(header, name), getattr(known.header, name)
        if ours != theirs:
            raise ValueError(f"{path}: {name} is {theirs}, here it is {ours}; measure into another file")
    return known.rows


def _tasks(plans: Sequence[Plan], pool: Pool, settings: BenchSettings) -> list[_Task]:
    first = plans[0]
    precision = first.settings.precision

    def one(job: Callable[..., Sequence[Row]], size: int, *arguments: object) -> Callable[[], list[Row]]:
        return lambda: list(pool.run(job, size, *arguments, timeout_s=settings.timeout_s)[0])

    tasks = [
        _Task("products", _has(MatmulRow), one(time_products, 1, precision)),
        _Task("copies", _has(CopyRow), one(time_copies, 1)),
        _Task("messages", _has(LinkRow), one(time_messages, 2)),
    ]
    tasks += [
        _Task(f"all-reduce of {size}", _has_reduction(size), one(time_reductions, size))
        for size in _group_sizes(plans) or [2]
    ]
    tasks.append(_Task("executor", _has(OverheadRow), lambda: list(time_executor(first, pool))))
    seen: set[tuple[str, str, int, int, int]] = set()
    for plan in plans:
        for point in points_of(plan, sizes=settings.sizes):
            key = point.key(plan)
            if key not in seen:
                seen.add(key)
                tasks.append(_layer_task(plan, point, pool, settings))
    return tasks


def _layer_task(plan: Plan, point: Point, pool: Pool, settings: BenchSettings) -> _Task:
    key = point.key(plan)
    layer = plan.model.module(point.module).layers[point.layer]

    def is_done(rows: Sequence[Row]) -> bool:
        return any(isinstance(row, LayerRow) and _key_of(row) == key for row in rows)

    def run() -> list[Row]:
        times = pool.run(
            time_point,
            settings.concurrency,
            plan,
            point,
            settings.budget_s,
            timeout_s=settings.timeout_s,
        )
        return list(rows_of(plan, point, times))

    what = f"{point.module}.{layer.name}, {point.num_rows} x {point.row.tokens_in} tokens"
    return _Task(what, is_done, run)


def _key_of(row: LayerRow) -> tuple[str, str, int, int, int]:
    return row.signature, row.precision, row.rows, row.tokens_in, row.attention_area


def _has(kind: type[Row]) -> Callable[[Sequence[Row]], bool]:
    return lambda rows: any(isinstance(row, kind) for row in rows)


def _has_reduction(size: int) -> Callable[[Sequence[Row]], bool]:
    return lambda rows: any(isinstance(row, CollectiveRow) and row.num_ranks == size for row in rows)


def _group_sizes(plans: Sequence[Plan]) -> list[int]:
    """Numbers of ranks that sum a gradient in any of the plans."""
    sizes = {len(group.ranks) for plan in plans for group in lower(plan).groups}
    return sorted(size for size in sizes if size > 1)
