"""Detects processes that a signal has stopped, from outside, as they cannot report it themselves."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

PROC = Path("/proc")
STOPPED = "T"  # in /proc/<pid>/stat; a debugger's stop, which is intended, has another letter
LOOK_EVERY_S = 0.5
LOOKS = 6  # consecutive looks that must find a process stopped


class StopWatch:
    """Polls processes of this machine, and reports those that have been stopped for long.

    Looks are counted, not seconds: a watcher that was stopped as well, as by Ctrl-Z of the whole job, or
    that had no core, did not look meanwhile. A process's state does not depend on the load: one that waits
    for a core, a peer or a disk is not stopped, so no healthy process is reported. Without /proc none is.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._next_s = 0.0

    def stopped(self, processes: Iterable[int]) -> tuple[int, ...]:
        """Processes that the last `LOOKS` looks found stopped; looks at most every `LOOK_EVERY_S`."""
        if time.monotonic() < self._next_s:
            return ()
        self._next_s = time.monotonic() + LOOK_EVERY_S
        stopped_now = [process for process in processes if is_stopped(process)]
        self._in_a_row = {process: self._in_a_row.get(process, 0) + 1 for process in stopped_now}
        return tuple(process for process, looks in self._in_a_row.items() if looks >= LOOKS)


@contextmanager
def stopped_are_killed(processes: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    """In this context, kill processes that have been stopped for long, each after its callback.

    By a thread, since a process that stops amid a message blocks its sender or receiver.
    """
    over = Event()

    def look() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the main thread to handle
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
