"""Finds processes with a mark in their environment, in /proc."""

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
    """A process as shown by /proc."""

    pid: int
    parent: int
    state: str
    command: str

    @property
    def is_python(self) -> bool:
        """Whether it is a Python program: not a shell, core burner or resource tracker."""
        return "python" in self.command.partition(" ")[0] and not any(
            word in self.command for word in KEEPERS
        )


def marked(mark: str) -> dict[int, Seen]:
    """Living processes with the mark, by process id."""
    entry = f"{MARK}={mark}".encode()
    processes = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if entry not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if fields[0] not in ENDED:
                processes[int(folder.name)] = Seen(int(folder.name), int(fields[1]), fields[0], command)
    return processes


def children(mark: str, parent: int) -> list[int]:
    """Python children of a process with the mark, sorted by process id."""
    return sorted(pid for pid, seen in marked(mark).items() if seen.parent == parent and seen.is_python)


def grandchildren(mark: str, parent: int) -> list[int]:
    """Children of its children."""
    return [grandchild for child in children(mark, parent) for grandchild in children(mark, child)]


def left_after(mark: str, within_s: float) -> list[Seen]:
    """Processes still there after a time; killed ones count only after `DYING_S`."""
    start_s = time.monotonic()
    while remaining := marked(mark):
        bound_s = DYING_S if all(map(is_killed, remaining)) else within_s
        if time.monotonic() - start_s >= bound_s:
            break
        time.sleep(LOOK_EVERY_S)
    return list(remaining.values())


def is_killed(pid: int) -> bool:
    """Whether a SIGKILL has reached a process, which then only needs a core to end."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask & KILL_PENDING for mask in pending)


def end_all(mark: str) -> None:
    """Kill all processes with the mark until none is left."""
    while remaining := marked(mark):
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def wait_for_some(find: Callable[[], list[int]], within_s: float) -> list[int]:
    """The first non-empty result of `find`; empty where it does not come in time."""
    deadline = time.monotonic() + within_s
    while not (result := find()) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return result


def until(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether the condition holds in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True
