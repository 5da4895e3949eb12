"""Bytes held by every rank over time."""

from collections.abc import Iterable

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
    changes: list[tuple[float, int, int]] = []
    for position, span in enumerate(spans):
        acquired = table.acquired_bytes.get((rank, span.action), 0)
        released = table.released_bytes.get((rank, span.action), 0)
        if acquired:
            changes.append((span.start_s, 2 * position, acquired))
        if released:
            changes.append((span.end_s, 2 * position + 1, -released))
    held = table.static_bytes.get(rank, 0)
    samples = [MemorySample(rank, 0.0, held)]
    for time_s, _, num_bytes in sorted(changes):
        held += num_bytes
        samples.append(MemorySample(rank, time_s, held))
    return samples
