"""Processes that carry a mark in their environment, found in /proc."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from experiments.chaos.forked import MARK

PROC = Path("/proc")
LOOK_EVERY_S = 0.02
ENDED = "ZX"
KEEPERS = ("keep_awake", "resource_tracker")
KILL_PENDING = 1 << (signal.SIGKILL - 1)  # in the masks of /proc/<pid>/status
DYING_S = 30.0  # that a killed process of idle priority may wait for a core to end on


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as /proc shows it."""

    pid: int
    parent: int
    state: str
    command: str

    @property
    def is_python(self) -> bool:
        """No shell, and no process that only keeps a core awake or names of shared memory."""
        return "python" in self.command.partition(" ")[0] and not any(
            word in self.command for word in KEEPERS
        )


def marked(mark: str) -> dict[int, Seen]:
    """Those that live and carry the mark, by number."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if fields[0] not in ENDED:
                found[int(folder.name)] = Seen(int(folder.name), int(fields[1]), fields[0], command)
    return found


def children(mark: str, parent: int) -> list[int]:
    """Python processes with the mark that a process has started, by number."""
    return sorted(pid for pid, seen in marked(mark).items() if seen.parent == parent and seen.is_python)


def grandchildren(mark: str, parent: int) -> list[int]:
    """Those that its children have started."""
    return [each for child in children(mark, parent) for each in children(mark, child)]


def left_after(mark: str, within_s: float) -> list[Seen]:
    """Those that are still there after so long; of those that are killed already, after `DYING_S`."""
    start_s = time.monotonic()
    while left := marked(mark):
        bound_s = DYING_S if all(map(is_killed, left)) else within_s
        if time.monotonic() - start_s >= bound_s:
            break
        time.sleep(LOOK_EVERY_S)
    return list(left.values())


def is_killed(pid: int) -> bool:
    """Whether a SIGKILL has reached a process: what is left for it is a turn on a core to end."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask & KILL_PENDING for mask in pending)


def end_all(mark: str) -> None:
    """Kill them until none is there."""
    while left := marked(mark):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def once_found(find: Callable[[], list[int]], within_s: float) -> list[int]:
    """What is found, as soon as it is anything; nothing where it does not come in time."""
    deadline = time.monotonic() + within_s
    while not (found := find()) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return found


def until(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True
