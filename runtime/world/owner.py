"""Identity of a process, distinct from later ones with the same id."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from workbench.strict_json import parse_strict

MOST_BYTES = 4096
PROC = Path("/proc")
ENDED_STATES = "ZXx"  # in /proc/<pid>/stat: a zombie


class Life(Enum):
    """Whether an owner is alive, as far as this process can tell."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"  # on another machine, or in another container


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process of some machine.

    Args:
        host: name of the machine.
        boot: id of the machine's boot; empty if it has none.
        space: its process namespace, a container's own or the machine's.
        pid: its process id.
        start: clock ticks from boot to its start; 0 if not available.
    """

    host: str
    boot: str
    space: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r:.80}"

    def life(self) -> Life:
        """Whether it still runs."""
        here = this_process()
        if self.host != here.host:
            return Life.UNKNOWN
        if self.boot != here.boot:
            return Life.ENDED
        if self.space != here.space:
            return Life.UNKNOWN
        start = _start_of(self.pid)
        return Life.ALIVE if start is not None and start == self.start else Life.ENDED

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def owner_from(content: bytes) -> Owner:
    """Decode the result of `as_json`.

    Raises:
        ValueError: it has another form.
    """
    match parse_strict(content, most_bytes=MOST_BYTES, most_depth=1):
        case {
            "host": str(host),
            "boot": str(boot),
            "space": str(space),
            "pid": int(pid),
            "start": int(start),
        } if pid > 0:
            return Owner(host=host, boot=boot, space=space, pid=pid, start=start)
    raise ValueError("it names no process")


def this_process() -> Owner:
    """The calling process."""
    pid = os.getpid()
    space = PROC / "self" / "ns" / "pid"
    return Owner(
        host=socket.gethostname(),
        boot=_text(PROC / "sys" / "kernel" / "random" / "boot_id").strip(),
        space=str(space.readlink()) if space.is_symlink() else "",
        pid=pid,
        start=_start_of(pid) or 0,
    )


def _start_of(pid: int) -> int | None:
    """Start of a process, in ticks since boot; None if it does not exist or has ended."""
    if not PROC.joinpath("self", "stat").exists():
        return 0 if _answers(pid) else None
    fields = _text(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ENDED_STATES else None


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
