"""Numbers of this machine's cores that were busy with this program, and with others."""

import os
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.float_sum import float_sum

PROCESSES = Path("/proc")
STAT = PROCESSES / "stat"
BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyCores:
    """Average numbers of busy cores over a time; together at most all cores, up to rounding."""

    num_cores: int
    own: float
    others: float


class CoreWatch:
    """Measures busy cores from its creation on; child processes count once they are waited for.

    `living`: returns the ids of processes that count while they are alive; called from time to time.
    """

    def __init__(self, living: Callable[[], Iterable[int]] = tuple) -> None:
        self._living = living
        self._start_s, self._own_s, self._all_s = time.monotonic(), self._own_so_far_s(), _all_s()

    def busy(self) -> BusyCores | None:
        """Busy cores since the start; None if they are not reported, or this program's cores are limited."""
        all_s, elapsed_s = _all_s(), time.monotonic() - self._start_s
        if all_s is None or self._all_s is None or elapsed_s <= 0:
            return None
        own = (self._own_so_far_s() - self._own_s) / elapsed_s
        busy = (all_s - self._all_s) / elapsed_s
        return BusyCores(num_cores=os.cpu_count() or 1, own=own, others=max(0.0, busy - own))

    def _own_so_far_s(self) -> float:
        return _own_s() + float_sum(process_seconds(self._living()).values())


def _own_s() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return float_sum(float_sum(resource.getrusage(usage)[:2]) for usage in who)


def _all_s() -> float | None:
    """Busy seconds of all cores since boot."""
    if not STAT.is_file() or len(os.sched_getaffinity(0)) != os.cpu_count():
        return None
    fields = STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]
    return float_sum(float(fields[index]) for index in BUSY) / os.sysconf("SC_CLK_TCK")


def process_seconds(processes: Iterable[int]) -> dict[int, float]:
    """Process id -> core seconds so far, without processes that are gone or unreadable."""
    seconds = {}
    for process in processes:
        with suppress(OSError):
            text = (PROCESSES / str(process) / "stat").read_text(encoding="ascii", errors="replace")
            user, system = text.rpartition(")")[2].split()[11:13]
            seconds[process] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds
