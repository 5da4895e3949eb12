"""Parse one line of a microbenchmark file: a flat JSON object with a kind, checked field by field."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from workbench.cost.layer_table import MOST_COUNT

MOST = sys.float_info.max  # JSON integers may exceed it
_NEVER_ZERO = {"seconds", "forward_s"}  # divisors of rates


def parse_line(path: Path, number: int, line: str, kinds: dict[str, Any]) -> Any:
    """Parse an object of one of these kinds; ValueError names file, line and field of the error.

    Args:
        path, number: of the file and the line, for the message.
        kinds: dataclass by the value of the line's "kind".
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{path}:{number}: nested too deeply") from None
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{path}:{number}: want kind {' | '.join(kinds)}, got {kind!r}")
    known = {field.name for field in fields(kinds[kind])}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"{path}:{number}: unknown field {unknown[0]!r}; a {kind} has {', '.join(sorted(known))}"
        )
    try:
        row = kinds[kind](**values)
    except TypeError as error:
        raise ValueError(f"{path}:{number}: {kind}: {error}") from error
    for field in fields(row):
        _check_value(f"{path}:{number}: {kind} {field.name}", field.type, getattr(row, field.name))
    return row


def _check_value(where: str, kind: Any, value: object) -> None:
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{where}: want text, got {value!r}")
    if kind is int and (not isinstance(value, int) or value < 0):
        raise ValueError(f"{where}: want a count >= 0, got {value!r}")
    if kind is int and isinstance(value, int) and value > MOST_COUNT:
        raise ValueError(
            f"{where}: want a count of at most {MOST_COUNT:,}, got one of {len(str(value))} digits"
        )
    optional = kind == float | None
    if optional and value is None:
        return
    if (kind is float or optional) and not (isinstance(value, int | float) and 0 <= value <= MOST):
        raise ValueError(f"{where}: want a finite number >= 0, got {value!r}")
    if value == 0 and where.rsplit(" ", 1)[-1] in _NEVER_ZERO:
        raise ValueError(f"{where}: want more than 0 seconds, got {value!r}")
