"""Units at the edges. Inside, everything is seconds, bytes and FLOP."""

from math import isfinite

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9

MS_PER_S = 1e3
US_PER_S = 1e6
S_PER_HOUR = 3_600.0
S_PER_DAY = 86_400.0

_UNIT_S = {"s": 1.0, "min": 60.0, "h": S_PER_HOUR, "d": S_PER_DAY}


def ms(duration_s: float) -> float:
    """Seconds as milliseconds, for printing."""
    return duration_s * MS_PER_S


def seconds(duration_ms: float) -> float:
    """Milliseconds, as papers print them, as seconds."""
    return duration_ms / MS_PER_S


def gib(num_bytes: float) -> float:
    """Bytes as GiB, for printing."""
    return num_bytes / GIB


def duration_s(text: str) -> float:
    """A duration as users say it, in seconds.

    Raises:
        ValueError: no number > 0 with one of the units s, min, h and d.

    Example:
        >>> duration_s("6h"), duration_s("90s"), duration_s("2.5min")
        (21600.0, 90.0, 150.0)
    """
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = text.strip()[len(number) :].strip()
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if unit not in _UNIT_S or not (isfinite(value) and value > 0):
        raise ValueError(f"bad duration {text!r}: want a number > 0 and s, min, h or d, e.g. '6h'")
    return value * _UNIT_S[unit]


def duration_text(length_s: float) -> str:
    """Seconds in the largest unit of which they are one at least.

    Example:
        >>> duration_text(21_600.0), duration_text(0.25)
        ('6 h', '0.25 s')
    """
    unit = next((name for name, size in reversed(_UNIT_S.items()) if length_s >= size), "s")
    return f"{length_s / _UNIT_S[unit]:.4g} {unit}"
