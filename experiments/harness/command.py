"""What the commands of experiments have in common: flags, tables, claims, an end; how long calls take."""

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
    """A parser that understands `--json`; `about`, the module's docstring, is its help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def timed(call: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[float, T]:
    """Seconds of a call by a clock, and what it returned."""
    start_s = clock()
    result = call()
    return clock() - start_s, result


def fastest_s(call: Callable[[], object], repeats: int) -> float:
    """Wall seconds of the fastest of several calls."""
    return min(timed(call)[0] for _ in range(repeats))


def reaches(value: float, must: float, *, at_most: bool) -> bool:
    """Whether a figure is as high as it must be, or as low."""
    return value <= must if at_most else value >= must


def print_rows(head: str, rows: Iterable[T], line: Callable[[T], str]) -> list[T]:
    """A table's rows, each printed as soon as it is there."""
    print(head)
    found = []
    for row in rows:
        found.append(row)
        print(line(row), flush=True)
    return found


def finish(
    record: Mapping[str, Any],
    claims: Mapping[str, bool] = MappingProxyType({}),
    *,
    as_json: bool,
    out: Path | None = None,
    holds: bool = True,
) -> int:
    """Print claims and, asked for, the record as the last line.

    Args:
        record: as JSON has it.
        out: file for it.
        holds: what else it is to show.

    Returns:
        The exit status: 1 where that or a claim does not hold.
    """
    for claim, is_true in claims.items():
        print(f"claim: {claim}: {'holds' if is_true else 'FAILS'}")
    if out is not None:
        write_text(json.dumps(record, indent=1) + "\n", out)
    if as_json:
        print(json.dumps(record))
    return 0 if holds and all(claims.values()) else 1


def run_main(main: Callable[[], int]) -> int:
    """The exit status of `main`; what it refuses is said in one line, and is 2."""
    try:
        return main()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
