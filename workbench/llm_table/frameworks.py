"""Conventions of training systems for what a row leaves open, and numbers fitted to them.

`frameworks.toml` has both, each with its reason and source. A convention fills a blank cell; numbers
override fields of the execution (`workbench.cost.execution.Execution`) by which the row is priced.
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
    """The file's tables: `rule`, `execution`, `compared` and `unscorable`."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def check_framework(name: str) -> None:
    """ValueError for an unknown framework, with the nearest known one."""
    known = sorted({rule["framework"] for table in frameworks().values() for rule in table})
    if not any(fnmatchcase(name, pattern) for pattern in known):
        near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"framework: nothing is known of {name!r:.60}; nearest: {near!r}, or leave it empty")


def filled(cells: Mapping[str, str]) -> dict[str, str]:
    """Fill blank cells by the conventions of their framework, in the order of the rules."""
    filled_in = dict(cells)
    for rule in _rules_for(cells, "rule"):
        if not filled_in.get(rule["column"]):
            filled_in[rule["column"]] = _value(rule["value"], filled_in)
    return filled_in


def presumed(cells: Mapping[str, str]) -> frozenset[str]:
    """Blank columns filled by a convention that no source documents."""
    first: dict[str, Rule] = {}
    for rule in _rules_for(cells, "rule"):
        if not cells.get(rule["column"]):
            first.setdefault(rule["column"], rule)
    return frozenset(column for column, rule in first.items() if rule.get("presumed", False))


def fitted_numbers(cells: Mapping[str, str]) -> dict[str, float]:
    """Field of an execution -> number fitted to the framework; later rules win."""
    return {rule["number"]: float(rule["value"]) for rule in _rules_for(cells, "execution")}


def fitted_off(cells: Mapping[str, str]) -> float:
    """Mean error, for the worst fitted number, on rows it was not fitted to; 0 without any."""
    error_by_number = {rule["number"]: rule.get("off", 0.0) for rule in _rules_for(cells, "execution")}
    return max(error_by_number.values(), default=0.0)


def is_compared(cells: Mapping[str, str]) -> bool:
    """Whether runs of the framework were compared with their predictions, and numbers fitted as needed."""
    return bool(_rules_for(cells, "compared"))


def unscorable(cells: Mapping[str, str]) -> str | None:
    """Why no row of that framework can be priced; None: it can."""
    return next((str(rule["reason"]) for rule in _rules_for(cells, "unscorable")), None)


def _rules_for(cells: Mapping[str, str], table: str) -> list[Rule]:
    """Rules that apply to a row as it was published."""
    name = cells.get("framework", "")
    return [
        rule
        for rule in frameworks().get(table, ())
        if name and fnmatchcase(name, rule["framework"]) and holds(rule.get("when", {}), cells)
    ]


def holds(when: Mapping[str, str], cells: Mapping[str, str]) -> bool:
    """Whether every named cell has the wanted value."""
    return all(_holds(value, cells.get(column, "")) for column, value in when.items())


def _holds(wanted: str, cell: str) -> bool:
    """Match a pattern; a blank one matches only a blank cell, and `<26.06` earlier releases."""
    if wanted.startswith(BEFORE):
        return bool(cell) and _parts(cell) < _parts(wanted.removeprefix(BEFORE))
    return fnmatchcase(cell, wanted) and bool(cell) is bool(wanted)


def _parts(release: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in release.split("."))


def _value(value: str, cells: Mapping[str, str]) -> str:
    """The value itself, or a quotient of columns such as `gpus / tp / pp`; blank if one has no count."""
    names = value.split(DIVISION)
    if len(names) == 1:
        return value
    counts = [cells.get(name) or "" for name in names]
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        return ""
    first, *divisors = map(int, counts)
    return str(max(1, first // prod(divisors)))
