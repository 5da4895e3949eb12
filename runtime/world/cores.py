"""The cores of this machine: which process runs on which, and how they are kept awake.

A virtual core without work for a fifth of a millisecond is given back to the host, which wakes it up at one
of its next ticks: whoever waits for a message of a tenth of a millisecond then gets it 2 to 4 ms late. A
process of idle priority on every core has work whenever nobody else has.
"""

import os
from collections.abc import Callable
from typing import Any

TURNS = 10_000  # of an empty loop, between two looks at the flag
LEAST_PRIORITY = 19


def cores_of(size: int) -> list[frozenset[int]]:
    """One core for each process where there are enough, else all cores for all; empty where the
    system cannot pin."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(available) < size:
        return [frozenset(available)] * size
    return [frozenset({available[process]}) for process in range(size)]


def can_stay_awake() -> bool:
    """Whether this system knows processes that run only where nobody else wants to."""
    return hasattr(os, "SCHED_IDLE") and hasattr(os, "sched_setaffinity")


def stay_awake(core: int, is_wanted: Any, next_order: Callable[[], bytes | None], parent: int) -> None:
    """Keep one core busy at idle priority after each order, for as long as the shared flag says.

    Args:
        core: to stay on.
        is_wanted: shared with the parent; 0: wait for the next order.
        next_order: waits for one; None: the parent is gone, or wants no more.
        parent: process id; work ends with it.
    """
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(LEAST_PRIORITY)  # so that the system counts it apart from others' work
    while next_order() is not None:
        while is_wanted.value and os.getppid() == parent:
            for _ in range(TURNS):
                pass
