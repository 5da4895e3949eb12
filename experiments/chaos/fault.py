"""External faults, and how they are inflicted on processes."""

import os
import random
import resource
import signal
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from workbench.stopped import is_stopped

PAUSE_S = 1.0  # shorter than what counts as hung
SEEN_S, LOOK_EVERY_S = 1.0, 0.005


class Fault(StrEnum):
    """Kinds of faults; `supervisor` is the started process, `worker` one of its children."""

    KILL_SUPERVISOR = "kill-supervisor"
    KILL_WORKER = "kill-worker"
    KILL_ALL = "kill-all"
    STOP_WORKER = "stop-worker"
    PAUSE_WORKER = "pause-worker"
    PAUSE_SUPERVISOR = "pause-supervisor"
    TERM_SUPERVISOR = "term-supervisor"
    TERM_WORKER = "term-worker"
    FULL_DISK = "full-disk"
    FILE_SIZE = "file-size-limit"
    NO_DESCRIPTORS = "no-descriptors"
    SLOW_DISK = "slow-disk"
    CLOCK_JUMPS = "clock-jumps"
    SECOND_SUPERVISOR = "second-supervisor"
    DELAYED_MESSAGES = "delayed-messages"
    LOST_MESSAGES = "lost-messages"
    CUT_CONNECTIONS = "cut-connections"
    KILL_TRAINER = "kill-trainer"
    TERM_TRAINER = "term-trainer"


INJECTED = (Fault.SLOW_DISK, Fault.CLOCK_JUMPS)  # from the start of the program, see `injected`
SIGNALS = {
    Fault.KILL_SUPERVISOR: signal.SIGKILL,
    Fault.KILL_WORKER: signal.SIGKILL,
    Fault.STOP_WORKER: signal.SIGSTOP,
    Fault.PAUSE_WORKER: signal.SIGSTOP,
    Fault.PAUSE_SUPERVISOR: signal.SIGSTOP,
    Fault.TERM_SUPERVISOR: signal.SIGTERM,
    Fault.TERM_WORKER: signal.SIGTERM,
    Fault.KILL_TRAINER: signal.SIGKILL,
    Fault.TERM_TRAINER: signal.SIGTERM,
}
OF_WORKERS = (
    Fault.KILL_WORKER,
    Fault.STOP_WORKER,
    Fault.PAUSE_WORKER,
    Fault.TERM_WORKER,
    Fault.FILE_SIZE,
    Fault.NO_DESCRIPTORS,
)
PAUSES = (Fault.PAUSE_WORKER, Fault.PAUSE_SUPERVISOR)


def inflict(fault: Fault, process: int, rng: random.Random) -> None:
    """Signal a process, or limit its descriptors or files; one that has ended is ignored."""
    with suppress(ProcessLookupError, FileNotFoundError):
        if fault is Fault.FILE_SIZE:
            limit(process, resource.RLIMIT_FSIZE, rng.choice((0, 1000, 20_000)))
        elif fault is Fault.NO_DESCRIPTORS:
            highest = max(int(descriptor.name) for descriptor in Path(f"/proc/{process}/fd").iterdir())
            limit(process, resource.RLIMIT_NOFILE, highest + 1 + rng.choice((0, 1, 3)))
        else:
            os.kill(process, SIGNALS[fault])


def strike(fault: Fault, process: int, rng: random.Random) -> int | None:
    """`inflict`, and continue after a pause; returns the process if it stays stopped."""
    inflict(fault, process, rng)
    if fault in PAUSES:
        time.sleep(PAUSE_S)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    if fault is not Fault.STOP_WORKER:
        return None
    deadline = time.monotonic() + SEEN_S  # signals take a moment on a busy machine
    while not is_stopped(process) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return process


def limit(process: int, kind: int, value: int) -> None:
    """Lower a soft limit of a running process; later forks inherit it."""
    _, hard = resource.prlimit(process, kind)
    resource.prlimit(process, kind, (value, hard))
