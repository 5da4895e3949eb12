"""What a row's training system does where the row itself does not say: conventions, and numbers fitted to it.

`frameworks.toml` has both, each with its reason and source. A convention fills a blank cell; numbers stand in
the execution (`workbench.cost.execution.Execution`) by which the row is priced.
"""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")
DIVISION = " / "
BEFORE = "<"

Rule = Mapping[str, Any]


@cache
def frameworks() -> Mapping[str, Sequence[Rule]]:
    """The file's tables: `rule`, `execution` and `unscorable`."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def check_framework(name: str) -> None:
    """ValueError for a framework of which nothing is known, with the nearest one."""
    known = sorted({rule["framework"] for table in frameworks().values() for rule in table})
    if not any(fnmatchcase(name, pattern) for pattern in known):
        near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"framework: nothing is known of {name!r:.60}; nearest: {near!r}, or leave it empty")


def filled(cells: Mapping[str, str]) -> dict[str, str]:
    """The cells with blanks filled by the conventions of their framework, in the order of the rules."""
    filled_in = dict(cells)
    for rule in _of(cells, "rule"):
        if not filled_in.get(rule["column"]):
            filled_in[rule["column"]] = _value(rule["value"], filled_in)
    return filled_in


def presumed(cells: Mapping[str, str]) -> frozenset[str]:
    """Blank columns that a convention fills which no source documents."""
    first: dict[str, Rule] = {}
    for rule in _of(cells, "rule"):
        if not cells.get(rule["column"]):
            first.setdefault(rule["column"], rule)
    return frozenset(column for column, rule in first.items() if rule.get("presumed", False))


def fitted_numbers(cells: Mapping[str, str]) -> dict[str, float]:
    """Field of an execution -> number that was fitted to the framework; later rules stand."""
    return {rule["number"]: float(rule["value"]) for rule in _of(cells, "execution")}


def fitted_off(cells: Mapping[str, str]) -> float:
    """Mean error of rows that the framework's numbers had not seen, of the worst number; 0 without any."""
    standing = {rule["number"]: rule.get("off", 0.0) for rule in _of(cells, "execution")}
    return max(standing.values(), default=0.0)


def unscorable(cells: Mapping[str, str]) -> str | None:
    """Why nothing can price a row of that framework; None: something can."""
    return next((str(rule["reason"]) for rule in _of(cells, "unscorable")), None)


def _of(cells: Mapping[str, str], table: str) -> list[Rule]:
    """Rules that hold of a row as it was printed."""
    name = cells.get("framework", "")
    return [
        rule
        for rule in frameworks().get(table, ())
        if name and fnmatchcase(name, rule["framework"]) and holds(rule.get("when", {}), cells)
    ]


def holds(when: Mapping[str, str], cells: Mapping[str, str]) -> bool:
    """Whether every named cell is as wanted."""
    return all(_holds(value, cells.get(column, "")) for column, value in when.items())


def _holds(wanted: str, cell: str) -> bool:
    """A pattern of the cell's text, a blank one only of a blank cell; `<26.06`: releases before that."""
    if wanted.startswith(BEFORE):
        return bool(cell) and _parts(cell) < _parts(wanted.removeprefix(BEFORE))
    return fnmatchcase(cell, wanted) and bool(cell) is bool(wanted)


def _parts(release: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in release.split("."))


def _value(value: str, cells: Mapping[str, str]) -> str:
    """The value itself, or columns divided by one another: `gpus / tp / pp`; blank where one has no count."""
    names = value.split(DIVISION)
    if len(names) == 1:
        return value
    counts = [cells.get(name) or "" for name in names]
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        return ""
    first, *divisors = map(int, counts)
    return str(max(1, first // prod(divisors)))
