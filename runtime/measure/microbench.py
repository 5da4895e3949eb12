"""Measures a machine without a model: operators, attention, copies, messages, collectives.

Run:     python -m runtime.measure.microbench --device cuda -o rows.jsonl
         torchrun --nproc-per-node 8 -m runtime.measure.microbench --device cuda -o rows.jsonl
Needs torch, triton and numpy alone, so that it can be carried to a machine without the rest. Layers
need models and a job: `workbench calibrate JOB --rows rows.jsonl` adds them to the same file.
"""

import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import triton

from runtime.measure.cells import cell_sizes, operator_cells
from runtime.measure.clock import Clock
from runtime.measure.wires import COLLECTIVES, Ring, time_collective, time_messages, time_overlap
from runtime.world.device import NAMES, kind_of, launched_device
from runtime.world.failure import RankError
from runtime.world.local_world import join_launched
from workbench.calibrate.measurement import (
    CollectiveRow,
    Header,
    LinkRow,
    Measurement,
    OverlapRow,
    Row,
    read_measurement,
    write_measurement,
)
from workbench.termination import leave

BAD_INPUT = 2  # exit code
BAR = 30  # characters
DEFAULT_TYPE = {"cpu": "float32", "cuda": "bfloat16"}
TYPES = ("bfloat16", "float32", "float64")
LAYERS_NEED = "layers of adapters: need transformers and a job, use `workbench calibrate JOB --rows FILE`"

Progress = Callable[[int, int, str], None]  # (done, total, what)


@dataclass(frozen=True, slots=True)
class Task:
    """A measurement: its name, whether its rows exist already, and the function that measures.

    `measure` is called on every participating process, and returns rows on the first.
    """

    what: str
    is_done: Callable[[Sequence[Row]], bool]
    measure: Callable[[], Sequence[Row]]


def run_tasks(
    tasks: Sequence[Task],
    header: Header,
    *,
    path: Path | None = None,
    progress: Progress = lambda done, total, what: None,
    agree: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows,
) -> Measurement:
    """Run the tasks whose rows are not yet in the file, and write rows as they come.

    Args:
        path: its rows are not measured again, so an interrupted run resumes.
        progress: called before each task and at the end.
        agree: makes the known rows equal on all processes.

    Raises:
        ValueError: the file has rows of another machine or of other software.
    """
    rows: list[Row] = list(agree(known_rows(path, header)))
    for done, task in enumerate(tasks):
        progress(done, len(tasks), task.what)
        if not task.is_done(rows):
            rows += task.measure()
            if path is not None:
                write_measurement(Measurement(header, tuple(rows)), path)
    progress(len(tasks), len(tasks), "measured")
    return Measurement(header, tuple(rows))


def known_rows(path: Path | None, header: Header) -> Sequence[Row]:
    """Rows of an earlier run; ValueError where machine or software differ.

    Packages that only one of the two names are ignored.
    """
    if path is None or not path.is_file():
        return ()
    earlier = read_measurement(path)
    for name in ("device", "device_name", "num_threads"):
        current, recorded = getattr(header, name), getattr(earlier.header, name)
        if current != recorded:
            raise ValueError(f"{path}: {name} is {recorded}, here it is {current}; measure into another file")
    installed = dict(header.versions)
    for package, version in earlier.header.versions:
        if installed.get(package, version) != version:
            raise ValueError(
                f"{path}: versions: {package} is {version}, here it is {installed[package]}; "
                "measure into another file"
            )
    return earlier.rows


def header_here(device: torch.device | str = "cpu", packages: Sequence[tuple[str, str]] = ()) -> Header:
    """Header of this machine and its software, with additional `packages`."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "triton": triton.__version__,
        **dict(packages),
    }
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda:
        properties = torch.cuda.get_device_properties(device)
        driver, clocks = _driver_and_clocks(torch.device(device).index or 0)
        versions |= {"cuda": str(torch.version.cuda), "driver": driver}
        name, memory_bytes = properties.name, properties.total_memory
    else:
        name, clocks = _processor_name(), "unlocked"
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Header(
        device=kind_of(name) if is_cuda else "cpu",
        device_name=name,
        memory_bytes=memory_bytes,
        num_threads=1,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        clocks=clocks,
        versions=tuple(sorted(versions.items())),
    )


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver_and_clocks(index: int) -> tuple[str, str]:
    """Driver version and application clocks, from nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown", "unknown: no nvidia-smi"
    query = "--query-gpu=driver_version,clocks.applications.graphics,clocks.max.graphics"
    answer = subprocess.run(
        [program, f"--id={index}", query, "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    parts = [part.strip() for part in answer.stdout.strip().split(",")]
    if answer.returncode or len(parts) != 3:
        return "unknown", "unknown: nvidia-smi does not say"
    return parts[0], f"applications {parts[1]}, at most {parts[2]}"


def operator_tasks(clock: Clock, dtype: torch.dtype) -> list[Task]:
    """Measurements of one process alone."""
    cells = operator_cells(clock.device, dtype, cell_sizes(clock.device))
    return [Task(cell.key, cell.is_in, partial(cell.measure, clock)) for cell in cells]


def wire_tasks(clock: Clock, rings: Sequence[Ring], mine: Callable[[Ring], bool]) -> list[Task]:
    """Measurements by processes together; rings of two also exchange messages."""
    tasks: list[Task] = []
    for ring in rings:

        def among(
            measure: Callable[[Clock, Ring], Sequence[Row]], ring: Ring = ring
        ) -> Callable[[], Sequence[Row]]:
            return lambda: measure(clock, ring) if mine(ring) else ()

        where = {"link": ring.link, "num_ranks": ring.size}
        if ring.size == 2:
            tasks.append(Task(f"messages, {ring.link}", _has(LinkRow, link=ring.link), among(time_messages)))
        tasks += [
            Task(
                f"{name} of {ring.size}, {ring.link}",
                _has(CollectiveRow, collective=name, **where),
                among(partial(_collective, name)),
            )
            for name in COLLECTIVES
        ]
        tasks.append(
            Task(f"overlap of {ring.size}, {ring.link}", _has(OverlapRow, **where), among(time_overlap))
        )
    return tasks


def _collective(name: str, clock: Clock, ring: Ring) -> Sequence[Row]:
    return time_collective(clock, ring, name)


def _has(kind: type[Row], **fields: object) -> Callable[[Sequence[Row]], bool]:
    """Predicate: whether rows include one of that kind with those fields."""

    def has_row(rows: Sequence[Row]) -> bool:
        return any(
            isinstance(row, kind) and all(getattr(row, name) == want for name, want in fields.items())
            for row in rows
        )

    return has_row


def rings_of(process: int, size: int, per_machine: int) -> list[Ring]:
    """Rings of 2, 4, 8, ... neighbours on the first machine, and the same across machines.

    A collective call, as each ring gets a process group. A ring across machines has one process of each.
    """
    chosen: list[tuple[str, tuple[int, ...]]] = []
    for count in (2**i for i in range(1, 16)):
        if count <= per_machine:
            chosen.append(("intra", tuple(range(count))))
        if count * per_machine <= size:
            chosen.append(("inter", tuple(range(0, count * per_machine, per_machine))))
    return [
        Ring(link=link, processes=members, process=process, group=dist.new_group(list(members)))
        for link, members in chosen
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Errors of input are one line."""
    options = _parse(arguments)
    try:
        _measure(options)
    except (ValueError, OSError, RankError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    process, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = launched_device(options.device)
    clock = Clock(device)
    skipped = [LAYERS_NEED]
    tasks = operator_tasks(clock, getattr(torch, options.precision or DEFAULT_TYPE[device.type]))
    if device.type == "cpu":
        skipped.append("host copies: there is no device")
    if size > 1:
        join_launched(os.environ, wait_s=options.timeout, device=device)
        tasks = [Task(t.what, t.is_done, t.measure if process == 0 else _nothing) for t in tasks]
        rings = rings_of(process, size, int(os.environ.get("LOCAL_WORLD_SIZE", str(size))))
        tasks = [*wire_tasks(clock, rings, lambda ring: process in ring.processes), *tasks]  # others wait
    else:
        skipped.append("messages and collectives: one process, start with torchrun --nproc-per-node N")
    path = options.output if process == 0 else None
    measurement = run_tasks(
        tasks,
        header_here(device),
        path=path,
        progress=_bar if process == 0 else lambda done, total, what: None,
        agree=_agreed if size > 1 else lambda rows: rows,
    )
    if process == 0:
        for what in skipped:
            sys.stderr.write(f"not measured: {what}\n")
        sys.stdout.write(f"{len(measurement.rows)} rows written to {options.output}\n")


def _nothing() -> Sequence[Row]:
    return ()


def _agreed(rows: Sequence[Row]) -> Sequence[Row]:
    """The first process's rows, on all processes."""
    shared = [list(rows)]
    dist.broadcast_object_list(shared)
    return shared[0]


def _bar(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        filled = BAR * done // max(total, 1)
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r[{'#' * filled}{'.' * (BAR - filled)}] {done}/{total} {what:40.40}{end}")
    else:
        sys.stderr.write(f"{done}/{total} {what}\n")
    sys.stderr.flush()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="runtime.measure.microbench", description="Measure this machine.")
    parser.add_argument("--device", choices=NAMES, required=True)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="file of rows, to continue and to keep"
    )
    parser.add_argument("--precision", choices=TYPES, help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds, of any single wait")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    leave(main())
