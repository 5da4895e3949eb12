"""Conversions of units at the edges; inside, everything is seconds, bytes and FLOP."""

import math
import re

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
FLOAT32_BYTES = 4

MS_PER_S = 1e3
US_PER_S = 1e6
S_PER_HOUR = 3_600.0
S_PER_DAY = 86_400.0

_UNIT_S = {"s": 1.0, "m": 60.0, "h": S_PER_HOUR, "d": S_PER_DAY, "w": 7 * S_PER_DAY}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_WANTED_MEMORY = re.compile(r"memory_gib >= [\d.]+ \(([\d,]+) bytes\)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def ms(duration_s: float) -> float:
    """Seconds as milliseconds, for printing."""
    return duration_s * MS_PER_S


def gib(num_bytes: float) -> float:
    """Bytes as GiB, for printing."""
    return num_bytes / GIB


def gib_text(num_bytes: float) -> str:
    """`4.2 GiB`, for messages."""
    return f"{gib(num_bytes):.3g} GiB"


def wanted_memory_text(num_bytes: int) -> str:
    """`memory_gib >= 44.954 (48,268,034,048 bytes)`: a job file's field, rounded up."""
    return f"memory_gib >= {math.ceil(1000 * gib(num_bytes)) / 1000:.3f} ({num_bytes:,} bytes)"


def wanted_memory_bytes(text: str) -> int | None:
    """Bytes of the `wanted_memory_text` in a message; None: it has none.

    Example:
        >>> wanted_memory_bytes(f"too large; want {wanted_memory_text(48_268_034_048)} or more ranks")
        48268034048
    """
    match = _WANTED_MEMORY.search(text)
    return None if match is None else int(match[1].replace(",", ""))


def duration_s(text: str, flag: str) -> float:
    """Seconds of `90s`, `90m`, `12h`, `3d` or `2w`, > 0; ValueError with the flag's name for other text.

    Example:
        >>> duration_s("6h", "--mtbf"), duration_s("2.5m", "--restart")
        (21600.0, 150.0)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{flag}: want a duration > 0 such as 60s, 90m, 12h, 3d or 2w, got {text!r:.60}")
    return float(match[1]) * _UNIT_S[match[2]]


def time_limit_s(text: str, flag: str) -> float:
    """As `duration_s`, where a number without a unit is seconds, >= 0.

    Example:
        >>> time_limit_s("20", "--budget"), time_limit_s("1.5m", "--budget")
        (20.0, 90.0)
    """
    if _NUMBER.fullmatch(text.strip()):
        return float(text)
    return duration_s(text, flag)


def duration_text(length_s: float) -> str:
    """Seconds as text in the largest unit of which there is at least one; the inverse of `duration_s`.

    Example:
        >>> duration_text(21_600.0), duration_text(0.25)
        ('6h', '0.25s')
    """
    unit = next((name for name, size in reversed(_UNIT_S.items()) if length_s >= size), "s")
    return f"{length_s / _UNIT_S[unit]:.4g}{unit}"
