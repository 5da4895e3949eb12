"""Long runs: memory, descriptors and threads of every process, sampled, and the growth of each.

Setup:   2,000 steps of a small model as a run with saves and as elastic training, and 20,000 requests of the
         preprocessing service; each load in a process of its own, its ranks, nodes and producers sampled by
         /proc: RSS, USS (private bytes), descriptors, threads.
Ours:    growth per 1,000 steps or requests: Theil and Sen's slope, as allocators take memory in jumps, with
         the 95 % interval of a moving-block bootstrap, as samples are like their neighbours.
Run:     python -m experiments.soak [--steps N] [--requests N] [--load NAME] [--out FOLDER] [--json]
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.harness.command import command_line
from experiments.harness.drawing import save
from experiments.harness.record import commit
from experiments.soak.draw import drawing
from experiments.soak.growth import PER, Growth, growth
from experiments.soak.loads import LOADS
from experiments.soak.sampling import MEASURES, Series
from workbench.supervised import as_parent, end_with
from workbench.whole_file import write_text

OUT = Path("out/soak")
STEPS, REQUESTS = 2_000, 20_000
LEAST = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all loads; exit code 1 where something grows."""
    arguments_given = _parse(arguments)
    series: dict[str, Series] = {}
    seconds: dict[str, float] = {}
    for name in arguments_given.load or LOADS:
        number = arguments_given.requests if name == "preprocess" else arguments_given.steps
        start_s = time.monotonic()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, initializer=end_with, initargs=(as_parent(),)) as alone:
            series[name] = alone.submit(LOADS[name], number).result()
        seconds[name] = round(time.monotonic() - start_s, 1)
    record = {
        "command": "python -m experiments.soak",
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "per": PER,
        "seconds": seconds,
        **growths(series),
    }
    write_text(json.dumps(record, indent=1) + "\n", arguments_given.out / "soak.json")
    paths = save(drawing(series), arguments_given.out, "soak")
    if arguments_given.json:
        print(json.dumps(record))
    else:
        print(*lines(record), *(f"written to {path}" for path in paths), sep="\n")
    return 0 if not record["leaks"] else 1


def growths(series: dict[str, Series]) -> dict[str, Any]:
    """Growth of every measure of every process and load, and the names of those that leak."""
    rows = {
        f"{load}/{process}/{measure}": growth(load_series.done, load_series.values(process, measure))
        for load, load_series in series.items()
        for process in load_series.by_process
        for measure in MEASURES
    }
    leaks = [name for name, growth_of in rows.items() if not growth_of.is_flat]
    return {
        "growth": {name: _record(growth_of) for name, growth_of in rows.items()},
        "leaks": [name for name in leaks if not _is_copied(name, leaks)],
    }


def _is_copied(name: str, growing: Sequence[str]) -> bool:
    """Private memory of a process whose resident memory stays: a fork that copies its parent's pages."""
    process, _, measure = name.rpartition("/")
    return measure == "uss_bytes" and f"{process}/rss_bytes" not in growing


def _record(growth_of_series: Growth) -> dict[str, Any]:
    return asdict(growth_of_series) | {"is_flat": growth_of_series.is_flat}


def lines(record: dict[str, Any]) -> list[str]:
    """A table of growth per 1,000, and of medians."""
    head = f"{'per 1,000':44}{'growth':>12}{'low':>12}{'high':>12}{'median':>16}"
    rows = [
        f"{name:44}{row['per_1000']:12.1f}{row['low']:12.1f}{row['high']:12.1f}{row['level']:16,.0f}"
        f"{'' if row['is_flat'] else '  GROWS'}"
        for name, row in record["growth"].items()
    ]
    return [head, *rows, f"leaks: {', '.join(record['leaks']) or 'none'}"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of batches")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="these alone; repeatable")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the record and the plot")
    parsed = parser.parse_args(arguments)
    if min(parsed.steps, parsed.requests) < LEAST:
        parser.error(f"want --steps and --requests of {LEAST} or more, for samples enough")
    return parsed


if __name__ == "__main__":
    sys.exit(main())
