"""A process that keeps a part of one core busy, as another user's would."""

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
    """Context with a process that uses such a share of a core; ValueError for a share outside (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"burner: want a share of a core in (0, 1], got {share:g}")
    return partial(_burning, share)


@contextmanager
def _burning(share: float) -> Iterator[int]:
    """Yield the process's id; the process ends with this one.

    Raises:
        ChildProcessError: it ended early, so that part of the block ran without it.
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
    """Alternate work and sleep within every period, until the parent has gone."""
    while os.getppid() == parent:
        until_s = time.perf_counter() + share * PERIOD_S
        while time.perf_counter() < until_s:
            pass
        time.sleep((1 - share) * PERIOD_S)


if __name__ == "__main__":
    burn(float(sys.argv[1]), int(sys.argv[2]))
