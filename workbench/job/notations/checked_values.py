"""Keys and values of a notation, checked; every mistake names its place and the nearest valid choice."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LARGEST = 10_000_000


def nearest_of(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`did you mean 'vision'?`, or what there is."""
    names = list(dict.fromkeys(map(str, known)))
    near = difflib.get_close_matches(given, names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}"


def check_keys(content: Mapping[str, Any], known: Sequence[str], *, where: str = "") -> None:
    """ValueError for a key that is not known."""
    for key in content:
        if key not in known:
            raise ValueError(f"unknown key '{where}{key}'; {nearest_of(str(key), known)}")


def mapping_of(value: Any, *, where: str) -> Mapping[str, Any]:
    """ValueError unless it has keys and values, keys being text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}: want keys and values, got {value!r:.60}")
    return value


def count_of(value: Any, *, where: str, least: int = 1) -> int:
    """ValueError unless it is a whole number from `least` on."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise ValueError(f"{where}: want a whole number from {least} to {LARGEST:,}, got {value!r:.60}")
    return value
