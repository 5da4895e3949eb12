"""Bytes held by a rank over time."""

from collections.abc import Sequence
from typing import NamedTuple

from workbench.memory.account import MemoryTable
from workbench.trace import Lane


class Curve(NamedTuple):
    """A sample per change, in order of time: it holds from then on, the last one of an instant for good."""

    times_s: tuple[float, ...]
    num_bytes: tuple[int, ...]


def memory_over_time(
    table: MemoryTable,
    rank: int,
    lanes: Sequence[Lane],
    start_s: Sequence[float],
    end_s: Sequence[float],
) -> Curve:
    """Static bytes, plus what passes acquire at their start, less what they release at their end.

    What runs beside passes takes and gives back memory when the program comes to it, as in a run, however
    long it waits for its lane: that is when the pass in front of it ends. So changes keep program order, and
    the peak is that of `workbench.memory.account.peak_bytes`, by which plans are accepted.

    Args:
        table: what is acquired and released.
        rank: whose memory.
        lanes, start_s, end_s: of the actions of its program, in their order.
    """
    come_s, held = 0.0, table.static_bytes[rank]
    times_s, num_bytes = [come_s], [held]
    each = zip(lanes, start_s, end_s, table.acquired_bytes[rank], table.released_bytes[rank], strict=True)
    for lane, starts_s, ends_s, taken, given in each:
        is_pass = lane is Lane.COMPUTE
        taken_s, come_s = (starts_s, ends_s) if is_pass else (come_s, come_s)
        for moment_s, change in ((taken_s, taken), (come_s, -given)):
            if change:
                held += change
                times_s.append(moment_s)
                num_bytes.append(held)
    return Curve(tuple(times_s), tuple(num_bytes))
