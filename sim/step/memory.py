"""Bytes held by a rank over time."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from workbench.memory.account import MemoryTable


class Curve(NamedTuple):
    """A sample per change, in order of time: it holds from then on, the last one of an instant for good."""

    times_s: tuple[float, ...]
    num_bytes: tuple[int, ...]


def memory_over_time(
    table: MemoryTable, rank: int, start_s: Sequence[float], end_s: Sequence[float]
) -> Curve:
    """Static bytes, plus what actions acquire at their start, less what they release at their end.

    At one instant, changes keep program order, an end before the starts it allows.

    Args:
        table: what is acquired and released.
        rank: whose memory.
        start_s, end_s: of the actions of its program, in their order, all lanes together.
    """
    acquired, released = table.acquired_bytes[rank], table.released_bytes[rank]
    changes = [(start_s[place], 2 * place, taken) for place, taken in enumerate(acquired) if taken]
    changes += [(end_s[place], 2 * place + 1, -given) for place, given in enumerate(released) if given]
    changes.sort()
    times_s = (0.0, *[time_s for time_s, _, _ in changes])
    held = accumulate([num_bytes for _, _, num_bytes in changes], initial=table.static_bytes[rank])
    return Curve(times_s, tuple(held))
