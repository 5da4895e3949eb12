"""Processes that a signal has stopped: seen from outside, as they cannot say so themselves."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

PROC = Path("/proc")
STOPPED = "T"  # in /proc/<pid>/stat; a debugger's stop is another letter, and somebody's wish
LOOK_EVERY_S = 0.5
LOOKS = 6  # in a row that must find a process stopped


class StopWatch:
    """Looks at processes of this machine now and then, and tells which have been stopped for long.

    Looks are counted, not seconds: a watcher that was stopped as well, as by Ctrl-Z of the whole job, or
    that had no core, has not looked meanwhile. What a process is in does not depend on the load: one that
    waits for a core, a peer or a disk is not stopped, so nobody healthy is told. Where the system has no
    /proc, nobody ever is.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._next_s = 0.0

    def stopped(self, processes: Iterable[int]) -> tuple[int, ...]:
        """Those that the last looks have all found stopped; it is looked only when it is time again."""
        if time.monotonic() < self._next_s:
            return ()
        self._next_s = time.monotonic() + LOOK_EVERY_S
        now = [process for process in processes if is_stopped(process)]
        self._in_a_row = {process: self._in_a_row.get(process, 0) + 1 for process in now}
        return tuple(process for process, looks in self._in_a_row.items() if looks >= LOOKS)


@contextmanager
def stopped_are_killed(processes: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    """Kill processes that have been stopped for long, each after its call: what comes next is their death.

    By a thread, since one that stops amid a message holds up whoever sends it or receives it.
    """
    over = Event()

    def look() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread's to hear
        watch = StopWatch()
        while not over.wait(LOOK_EVERY_S):
            for process in watch.stopped(processes):
                processes[process]()
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    thread = Thread(target=look, name="stopped processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_stopped(process: int) -> bool:
    """Whether a process is stopped at this moment."""
    try:
        stat = (PROC / str(process) / "stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == [STOPPED]
