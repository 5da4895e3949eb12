"""Bytes held by every rank over time."""

from collections.abc import Iterable
from itertools import accumulate, repeat

from workbench.memory.account import MemoryTable
from workbench.trace import MemorySample, Span


def memory_over_time(table: MemoryTable, rank: int, spans: Iterable[Span]) -> list[MemorySample]:
    """Static bytes, plus what actions acquire at their start, less what they release at their end.

    Args:
        table: what is acquired and released.
        rank: whose memory.
        spans: of that rank, in program order, all lanes together.

    Returns:
        One sample per change, in order of time. At one instant, changes keep program order,
        an end before the starts it allows; the last one of the instant holds from then on.
    """
    acquired_bytes, released_bytes = table.acquired_bytes.get, table.released_bytes.get
    changes: list[tuple[float, int, int]] = []
    for position, (_, _, action, start_s, end_s) in enumerate(spans):
        key = rank, action
        if acquired := acquired_bytes(key):
            changes.append((start_s, 2 * position, acquired))
        if released := released_bytes(key):
            changes.append((end_s, 2 * position + 1, -released))
    changes.sort()
    times_s = (0.0, *(time_s for time_s, _, _ in changes))
    held = accumulate((num_bytes for _, _, num_bytes in changes), initial=table.static_bytes.get(rank, 0))
    return list(map(MemorySample, repeat(rank), times_s, held))
