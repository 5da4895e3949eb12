"""Shared by the commands of experiments: flags, tables, claims, exit status, and timing of calls.

A bench is a declaration; the parameters of its function are its flags:

@bench(rounds="of every way")
def run(rounds: int = 5) -> Found:
    return Found({"step_s": ...}, {"a step takes less than 1 s": ...})

It ends its module: `python -m experiments.bench.<bench>` runs it there.
"""

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from workbench.whole_file import write_text

T = TypeVar("T")
BAD_INPUT = 2  # exit code


@dataclass(frozen=True, slots=True)
class Found:
    """What a bench has measured.

    Args:
        record: JSON-compatible.
        claims: whether each holds.
        holds: whether everything else does.
        out: file to write the record to.
    """

    record: Mapping[str, Any]
    claims: Mapping[str, bool] = field(default_factory=dict)
    holds: bool = True
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """A declared bench.

    Args:
        compute: measures, prints tables, and returns what it has found; a ValueError is bad input. Its
            parameters are flags of their defaults' types; a tuple is of words, and one that is None by
            default is a file.
        helps: help texts of flags, by parameter.
    """

    compute: Callable[..., Found]
    helps: Mapping[str, str]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run it as a command.

        Returns:
            The exit status: 1 where a claim fails, 2 on bad input.
        """
        parser = command_line(self.compute.__globals__["__doc__"])
        for name, parameter in inspect.signature(self.compute).parameters.items():
            flag, default, text = f"--{name.replace('_', '-')}", parameter.default, self.helps.get(name)
            if isinstance(default, bool):
                parser.add_argument(flag, action="store_true", help=text)
            elif isinstance(default, tuple):
                parser.add_argument(flag, nargs="+", default=default, help=text)
            else:
                kind = Path if default is None else type(default)
                parser.add_argument(flag, type=kind, default=default, help=text)
        values = vars(parser.parse_args(argv))
        as_json = values.pop("json")

        def run() -> int:
            found = self.compute(**values)
            return finish(found.record, found.claims, as_json=as_json, out=found.out, holds=found.holds)

        return run_main(run)


def bench(**helps: str) -> Callable[[Callable[..., Found]], Bench]:
    """Declare a module's bench, which is run at once where the module is the program."""

    def declared(compute: Callable[..., Found]) -> Bench:
        declared_bench = Bench(compute, helps)
        if compute.__globals__["__name__"] == "__main__":
            raise SystemExit(declared_bench.main())
        return declared_bench

    return declared


def want_at_least(least: float, **values: float) -> None:
    """Raise ValueError, in the words of the flags, for a value below the least."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')}: want {least:g} or more, got {value:g}")


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
    claims: Mapping[str, bool] | None = None,
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
    claims = claims or {}
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
