"""Processes that end with the one that started them, whatever ends it."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)
INIT = 1  # the process that takes over others whose parents have ended
LOOK_EVERY_S = 0.2  # where the system has no descriptors of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The process that starts another, as described to the child before it runs.

    Args:
        pid: its process id.
        is_steady: whether its starting thread lasts as long as the process: Linux signals the thread's end.
    """

    pid: int
    is_steady: bool


def as_parent() -> Parent:
    """This process, about to start another from this thread."""
    return Parent(pid=os.getpid(), is_steady=threading.current_thread() is threading.main_thread())


def as_arguments(parent: Parent) -> tuple[str, str]:
    """Arguments for the command line of a process that is not a fork of this one."""
    return str(parent.pid), str(int(parent.is_steady))


def from_arguments(arguments: Sequence[str]) -> Parent:
    """The parent from the arguments of `as_arguments`."""
    pid, is_steady = arguments
    return Parent(pid=int(pid), is_steady=is_steady == "1")


def same_imports() -> dict[str, str]:
    """Environment of another interpreter that imports the same modules as this one.

    It is to be started with `-P`: otherwise it would import those of the folder in which the user is.
    """
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.curdir for entry in sys.path)}


def end_with(parent: Parent) -> None:
    """Kill this process when its parent ends, or at once where it has ended.

    The system's signal also ends a process that is stopped or deep in a library, but it follows the end of
    the thread that started this one, so it is used only for main threads. Otherwise a thread watches the
    parent.
    """
    if parent.is_steady and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    descriptor = _descriptor(parent.pid)
    if os.getppid() != parent.pid:  # the parent ended before the lines above
        _end()
    threading.Thread(target=_watch, args=(parent.pid, descriptor), name="parent", daemon=True).start()


def end_with_launcher() -> None:
    """End with a launcher that starts processes from its main thread, as torchrun's agent does.

    Where it has already ended, its processes were adopted by the machine's first process, which launches
    nothing unless it is a Python program itself, as in a container.
    """
    parent = os.getppid()
    if parent == INIT and b"python" not in _command_of(INIT):
        _end()
    end_with(Parent(pid=parent, is_steady=True))


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descriptor(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _watch(parent: int, descriptor: int | None) -> None:
    if descriptor is None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY_S)
    else:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
