"""Memory of a rank over time."""

from collections.abc import Sequence
from typing import NamedTuple

from workbench.memory.account import MemoryTable
from workbench.trace import Lane


class Curve(NamedTuple):
    """Samples of memory in order of time, one per change; of several at one instant, the last one holds."""

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

    Actions that overlap passes acquire and release memory when the program reaches them, as in a real run,
    however long they wait for their lane: at the end of the pass in front of them. So changes keep program
    order, and the peak is that of `workbench.memory.account.peak_bytes`, by which plans are accepted.

    Args:
        table: bytes that actions acquire and release.
        rank: the rank.
        lanes, start_s, end_s: of the actions of its program, in their order.
    """
    now_s, held_bytes = 0.0, table.static_bytes[rank]
    times_s, num_bytes = [now_s], [held_bytes]
    actions = zip(lanes, start_s, end_s, table.acquired_bytes[rank], table.released_bytes[rank], strict=True)
    for lane, begin_s, stop_s, acquired, released in actions:
        is_pass = lane is Lane.COMPUTE
        acquired_s, now_s = (begin_s, stop_s) if is_pass else (now_s, now_s)
        for moment_s, change in ((acquired_s, acquired), (now_s, -released)):
            if change:
                held_bytes += change
                times_s.append(moment_s)
                num_bytes.append(held_bytes)
    return Curve(tuple(times_s), tuple(num_bytes))
