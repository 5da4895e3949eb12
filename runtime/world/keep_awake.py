"""Keeps one core busy whenever nobody else wants it: a program by itself, small and soon ended.

Run:     python keep_awake.py CORE PARENT
"""

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # of prctl
LEAST_PRIORITY = 19


def main(core: int, parent: int) -> None:
    """Until somebody ends it, and never longer than its parent lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above: at the priority below an end takes long
        return
    os.sched_setaffinity(0, {core})
    os.nice(LEAST_PRIORITY)  # so that the system counts it apart from others' work
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
