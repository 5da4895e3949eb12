"""A process that keeps a part of one core busy, as somebody else's would."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

PERIOD_S = 0.02
STOP_S = 5.0


def burner_of(share: float) -> Callable[[], AbstractContextManager[int]]:
    """Makes a process that wants so much of a core, and ends it; ValueError for a share outside (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"burner: want a share of a core in (0, 1], got {share:g}")
    return partial(_burning, share)


@contextmanager
def _burning(share: float) -> Iterator[int]:
    """Gives the process's id. Nobody counts it as their own until it has ended; it ends with this one.

    Raises:
        ChildProcessError: it ended before it was told to, so that what ran beside it ran partly alone.
    """
    burner = subprocess.Popen([sys.executable, "-m", __name__, str(share), str(os.getpid())])
    try:
        yield burner.pid
        if (code := burner.poll()) is not None:
            raise ChildProcessError(f"burner: want it to work until it is stopped, it ended with code {code}")
    finally:
        burner.terminate()
        burner.wait(STOP_S)


def burn(share: float, parent: int) -> None:
    """Work for so much of every period and sleep for the rest, until the parent is gone."""
    while os.getppid() == parent:
        until_s = time.perf_counter() + share * PERIOD_S
        while time.perf_counter() < until_s:
            pass
        time.sleep((1 - share) * PERIOD_S)


if __name__ == "__main__":
    burn(float(sys.argv[1]), int(sys.argv[2]))
