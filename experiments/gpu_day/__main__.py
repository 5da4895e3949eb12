"""The campaign on one GPU: all its measurements, in calls that each resume where the last one stopped.

Run:     python -m experiments.gpu_day --out DIR [--from DIR ...] [--only PART ...] [--cells WORD ...]
         [--share I/N] [--limit SECONDS] [--device cuda|cpu] [--small] [--json]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.gpu_day.campaign import MISSING, PARTS, Extent, Part, Session, part_named
from experiments.gpu_day.drive import START_S, Choice, Deadline, Here, PartState, drive
from experiments.gpu_day.store import opened
from experiments.gpu_day.summary import Rows, figures
from experiments.gpu_day.worker import CellError, Worker
from experiments.harness.command import run_main

FACTS = "experiments.gpu_day.environment"
KERNELS = "experiments.gpu_day.kernels"
LEAST_LIMIT_S = 10.0


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS, facts: str = FACTS) -> int:
    """0 where nothing failed, 1 where a part did, 2 for bad input.

    Args:
        parts: of the campaign.
        facts: module whose `facts(session)` says what measures.
    """
    options = _parse(arguments)
    return run_main(lambda: _main(options, tuple(parts), facts))


def _main(options: argparse.Namespace, parts: tuple[Part, ...], facts: str) -> int:
    only = tuple(part_named(name, parts) for name in options.only)
    choice = Choice(only or parts, tuple(options.cells), _share(options.share))
    if options.limit is not None and not options.limit >= LEAST_LIMIT_S:
        raise ValueError(f"--limit: want at least {LEAST_LIMIT_S:g} s, got {options.limit:g}")
    deadline = Deadline(options.limit)
    extent = Extent.SMALL if options.small else Extent.FULL
    with Worker(Session(options.device, extent, options.out)) as worker:
        here = _here(worker, facts, extent)
        store = opened(options.out, options.earlier, [part.name for part in parts], here.device_name)
        states = drive(parts, choice, worker, store, here, deadline, _say)
        rows = {name: store.values(name, state.stamp) for name, state in states.items()}
        ratios = _ratios(worker, rows)
    result = summary(states, rows, here) | figures(rows, ratios) | {"seconds": round(deadline.spent_s, 1)}
    for line in lines(result, states):
        sys.stdout.write(f"{line}\n")
    if options.json:
        sys.stdout.write(f"{json.dumps(result)}\n")
    return 1 if result["parts_failed"] else 0


def _share(text: str) -> tuple[int, int]:
    """`2/5`; ValueError for anything else."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ValueError(f"--share: want I/N with 1 <= I <= N, such as 2/5, got {text!r}")
    return int(number), int(of)


def _here(worker: Worker, module: str, extent: Extent) -> Here:
    """What measures. ValueError: there is no such device, or its process does not start."""
    try:
        facts = worker.call(module, "facts", timeout_s=START_S)
    except CellError as error:
        raise ValueError(f"the process that measures did not start: {error}") from error
    return Here(device_name=facts["device_name"], versions=dict(facts["versions"]), extent=extent)


def _ratios(worker: Worker, rows: Mapping[str, Rows]) -> dict[str, float | None]:
    """What the kernels' rows say, if there are any: they are read where kernels are imported."""
    kernels = rows.get("kernels")
    if not kernels:
        return {}
    ratios: dict[str, float | None] = worker.call(KERNELS, "ratios", kernels, timeout_s=START_S)
    return ratios


def summary(states: dict[str, PartState], rows: Mapping[str, Rows], here: Here) -> dict[str, Any]:
    """What `--json` prints besides figures. A part counts as done when all its cells have rows."""
    return {
        "device": here.device_name,
        "extent": here.extent.value,
        "versions": dict(here.versions),
        "parts_done": sum(state.is_done for state in states.values()),
        "parts_failed": sum(bool(state.failures) for state in states.values()),
        "failures": [failure for state in states.values() for failure in state.failures],
        "rows": {name: len(rows_of_part) for name, rows_of_part in rows.items()},
        "missing": list(MISSING),
    }


def lines(result: dict[str, Any], states: dict[str, PartState]) -> list[str]:
    """The end of a call, for people."""
    summary_lines = []
    for name, state in states.items():
        total = "?" if state.num_cells is None else state.num_cells
        word = "failed" if state.failures else "done" if state.is_done else "left"
        summary_lines.append(f"{name:12s} {state.num_done}/{total} {word}")
    summary_lines += [f"FAILED {failure}" for failure in result["failures"]]
    summary_lines += [f"MISSING {what}: needs more than one GPU" for what in result["missing"]]
    for name in FIGURES:
        value = result[name]
        summary_lines.append(f"{name:18s} {'not measured' if value is None else f'{value:.4g}'}")
    return summary_lines


FIGURES = tuple(figures({}, {}))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_day", description="Measure everything that one GPU can show."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows")
    parser.add_argument(
        "--from",
        type=Path,
        dest="earlier",
        nargs="+",
        default=[],
        metavar="DIR",
        help="rows of earlier calls, to resume from",
    )
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"some of {names}")
    parser.add_argument(
        "--cells", nargs="+", default=[], metavar="WORD", help="only cells with one of these in their name"
    )
    parser.add_argument(
        "--share", default="1/1", metavar="I/N", help="only every N-th cell of a part, from the I-th"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop before so many are over")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that all of it works")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
