"""How a process leaves a world of gloo ranks that is broken, without ending itself."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def open_sockets() -> frozenset[int]:
    """Of this process, by inode: what it had before it was in any world is not its to close."""
    return frozenset(inode for inode, _ in _sockets())


def sever(spared: frozenset[int]) -> None:
    """Shut down the internet connections of this process; whoever waits on one fails at once, on both ends.

    gloo cannot abort what it waits for, and a rank that waits for a living one learns of a death
    elsewhere only by its timeout. Sockets that listen are left alone: gloo's listener would end
    the process.

    Args:
        spared: inodes that are left alone.
    """
    for inode, connection in _sockets():
        with suppress(OSError):
            is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            is_listener = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_internet and not is_listener and inode not in spared:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """(inode, a handle of its own) of every socket."""
    for path in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            about = os.fstat(int(path.name))
            if stat.S_ISSOCK(about.st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as found:
                    yield about.st_ino, found
