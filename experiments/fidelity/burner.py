"""A process that keeps a part of one core busy, as somebody else's would."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD_S = 0.02
STOP_S = 5.0


@contextmanager
def burning(share: float) -> Iterator[int]:
    """While this holds, a process wants so much of a core; gives its id.

    Nobody counts it as their own until it has ended, which it does with this process.

    Raises:
        ValueError: a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"burner: want a share of a core in (0, 1], got {share:g}")
    burner = subprocess.Popen([sys.executable, "-m", __name__, str(share), str(os.getpid())])
    try:
        yield burner.pid
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
