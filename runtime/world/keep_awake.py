"""Keeps one core busy at idle priority: a separate small program.

Run:     python keep_awake.py CORE PARENT
"""

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # of prctl
LEAST_PRIORITY = 19


def main(core: int, parent: int) -> None:
    """Run until it is killed, at most as long as its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if (
        os.getppid() != parent
    ):  # the parent ended before the call above; ending takes long at the priority below
        return
    os.sched_setaffinity(0, {core})
    os.nice(LEAST_PRIORITY)  # so that the system accounts for it separately
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
