"""Shared by the commands of experiments: flags, tables, claims, exit status, and timing of calls."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from workbench.whole_file import write_text

T = TypeVar("T")
BAD_INPUT = 2  # exit code


def command_line(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json`; `about`, the module's docstring, is its help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def timed(call: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[float, T]:
    """Return the seconds of a call by a clock, and its result."""
    start_s = clock()
    result = call()
    return clock() - start_s, result


def fastest_s(call: Callable[[], object], repeats: int) -> float:
    """Wall seconds of the fastest of several calls."""
    return min(timed(call)[0] for _ in range(repeats))


def reaches(value: float, must: float, *, at_most: bool) -> bool:
    """Whether a figure is at least, or at most, its goal."""
    return value <= must if at_most else value >= must


def print_rows(head: str, rows: Iterable[T], line: Callable[[T], str]) -> list[T]:
    """Return a table's rows after printing each as soon as it is available."""
    print(head)
    printed = []
    for row in rows:
        printed.append(row)
        print(line(row), flush=True)
    return printed


def finish(
    record: Mapping[str, Any],
    claims: Mapping[str, bool] = MappingProxyType({}),
    *,
    as_json: bool,
    out: Path | None = None,
    holds: bool = True,
) -> int:
    """Print the claims and, if asked, the record as the last line.

    Args:
        record: JSON-compatible.
        out: file to write it to.
        holds: whether everything else holds.

    Returns:
        The exit status: 1 where `holds` is false or a claim does not hold.
    """
    for claim, is_true in claims.items():
        print(f"claim: {claim}: {'holds' if is_true else 'FAILS'}")
    if out is not None:
        write_text(json.dumps(record, indent=1) + "\n", out)
    if as_json:
        print(json.dumps(record))
    return 0 if holds and all(claims.values()) else 1


def run_main(main: Callable[[], int]) -> int:
    """Return the exit status of `main`; a ValueError or OSError is printed as one line and gives 2."""
    try:
        return main()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
