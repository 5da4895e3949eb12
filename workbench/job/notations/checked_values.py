"""Checks of a notation's keys and values; errors name the place and the nearest valid choice."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LARGEST = 10_000_000


def nearest_of(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint such as `did you mean 'vision'?`, or a list of the known names."""
    names = list(dict.fromkeys(map(str, known)))
    near = difflib.get_close_matches(given, names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}"


def check_keys(content: Mapping[str, Any], known: Sequence[str], *, where: str = "") -> None:
    """Raise ValueError for an unknown key."""
    for key in content:
        if key not in known:
            raise ValueError(f"unknown key '{where}{key}'; {nearest_of(str(key), known)}")


def mapping_of(value: Any, *, where: str) -> Mapping[str, Any]:
    """The value; ValueError unless it is a mapping with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}: want keys and values, got {value!r:.60}")
    return value


def count_of(value: Any, *, where: str, least: int = 1) -> int:
    """The value; ValueError unless it is a whole number of `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise ValueError(f"{where}: want a whole number from {least} to {LARGEST:,}, got {value!r:.60}")
    return value
