"""The cores of this machine: pinning of processes, and keeping cores awake.

A virtual core that is idle for a fifth of a millisecond is returned to the host, which wakes it up at one of
its next ticks: a message of a tenth of a millisecond then arrives 2 to 4 ms late. A process of idle priority
on every core prevents that.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from runtime.world import keep_awake
from workbench.termination import uninterrupted

END_S = 2.0
POLL_S = 0.002


def cores_of(size: int) -> list[frozenset[int]]:
    """One core for each process where there are enough, else all cores for all; empty where the
    system cannot pin."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(available) < size:
        return [frozenset(available)] * size
    return [frozenset({available[process]}) for process in range(size)]


class Keepers:
    """Processes that keep cores awake, stopped while not needed; none where that is not supported."""

    def __init__(self) -> None:
        self._by_core: dict[int, int] = {}

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(self._by_core.values())

    def wake(self, cores: Iterable[int]) -> None:
        """Keep these cores awake from now on."""
        if not sys.platform.startswith("linux"):
            return
        for core in cores:
            if core in self._by_core:
                _signal(self._by_core[core], signal.SIGCONT)
            else:
                self._by_core[core] = _start(core)

    def rest(self) -> None:
        """Stop keeping cores awake."""
        for process in self._by_core.values():
            _signal(process, signal.SIGSTOP)

    def close(self) -> None:
        """End the processes."""
        for process in self._by_core.values():
            with suppress(OSError):  # may be forbidden; at idle priority it takes a moment to end
                os.sched_setscheduler(process, os.SCHED_OTHER, os.sched_param(0))
            _signal(process, signal.SIGKILL)
        for process in self._by_core.values():
            _await(process)
        self._by_core.clear()


def _start(core: int) -> int:
    words = [sys.executable, "-I", "-S", keep_awake.__file__, str(core), str(os.getpid())]
    with uninterrupted():
        return os.posix_spawn(sys.executable, words, os.environ)


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it was killed, which only delays messages
        os.kill(process, number)


def _await(process: int) -> None:
    stop_s = time.monotonic() + END_S
    with suppress(ChildProcessError):
        while os.waitpid(process, os.WNOHANG)[0] == 0 and time.monotonic() < stop_s:
            time.sleep(POLL_S)
