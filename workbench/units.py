"""Units at the edges. Inside, everything is seconds, bytes and FLOP."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9

MS_PER_S = 1e3
US_PER_S = 1e6
S_PER_HOUR = 3_600.0
S_PER_DAY = 86_400.0


def ms(duration_s: float) -> float:
    """Seconds as milliseconds, for printing."""
    return duration_s * MS_PER_S


def seconds(duration_ms: float) -> float:
    """Milliseconds, as papers print them, as seconds."""
    return duration_ms / MS_PER_S


def gib(num_bytes: float) -> float:
    """Bytes as GiB, for printing."""
    return num_bytes / GIB
