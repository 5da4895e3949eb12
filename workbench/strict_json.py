"""Parses untrusted JSON: limited size and nesting, unique keys, finite numbers."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

MOST_DEPTH = 32
MOST_DIGITS = 40
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_strict(content: bytes, *, most_bytes: int, most_depth: int = MOST_DEPTH) -> Any:
    """Parse JSON bytes.

    Raises:
        ValueError: too long, nested too deeply, not JSON in UTF-8, a duplicate key, or a number that is not
            finite.
    """
    if len(content) > most_bytes:
        raise ValueError(f"want at most {most_bytes} bytes of JSON, got {len(content)}")
    if depth_of(content) > most_depth:
        raise ValueError(f"want JSON nested at most {most_depth} deep")
    return json.loads(
        content.decode("utf-8"),
        object_pairs_hook=_each_once,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=_whole,
    )


def depth_of(content: bytes) -> int:
    """The nesting depth of brackets outside strings, without parsing."""
    depth = deepest = 0
    for token in _STRING_OR_BRACKET.finditer(content):
        if token[0] in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token[0] in (b"]", b"}"):
            depth -= 1
    return deepest


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r:.60} stands twice")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"want finite numbers, got {name}")


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"want whole numbers of at most {MOST_DIGITS} digits, got {len(text)}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"want finite numbers, got {text:.60}")
    return value
