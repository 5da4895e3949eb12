"""Runs a program of the workbench with a disk that is slow, or a clock that jumps, in all its processes.

Run:     python -m experiments.chaos.injected FAULT SEED PROGRAM ...
"""

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.chaos.fault import Fault
from experiments.chaos.forked import main_of
from workbench.termination import leave

SLOW_S = (0.05, 0.4)  # that a write to the disk takes longer
JUMP_S = 1e6


def slow_disk(rng: random.Random) -> None:
    """Slow down syncing and renaming of files."""

    def slowed(do: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_do(*args: Any) -> Any:
            time.sleep(rng.uniform(*SLOW_S))
            return do(*args)

        return wait_and_do

    os.fsync = slowed(os.fsync)
    Path.replace = slowed(Path.replace)  # type: ignore[method-assign]


def clock_jumps(rng: random.Random) -> None:
    """Make the time of day jump at every read, without touching the machine's clock."""
    true_time = time.time
    time.time = lambda: true_time() + rng.uniform(-JUMP_S, JUMP_S)


def inject(fault: Fault, seed: str) -> None:
    """Inject from now on."""
    {Fault.SLOW_DISK: slow_disk, Fault.CLOCK_JUMPS: clock_jumps}[fault](random.Random(seed))


def main(arguments: Sequence[str]) -> int:
    """Inject, then run the program."""
    fault, seed, *program = arguments
    inject(Fault(fault), seed)
    return main_of(program)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
