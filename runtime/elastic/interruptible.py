"""A world of gloo ranks that a process can leave at once, whatever gloo waits for."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from runtime.world.clock import Awaited, Clock
from runtime.world.failure import RankError

BACKEND = "elastic_gloo"
LOOK_EVERY_S = 0.005
MOST_CALLS = 256  # at a time, those that were left behind included

Result = TypeVar("Result")


class InterruptibleGloo:
    """Calls of gloo in threads of their own, which are left behind when the calls are interrupted.

    gloo cannot abort what it waits for. While it connects a group it does not hear that a peer has
    died: it waits for the dead one to call, or calls it again and again. And when a connection breaks,
    it tells everyone who waits on it but the one whose message was half on its way (its
    `Pair::signalException` passes over the operation that is being written or read). Each of them ends
    with its timeout alone, and a group ends when all that is under way in it has ended. The threads that
    are left behind touch nothing that later groups use.
    """

    def __init__(self) -> None:
        self._is_interrupted = Event()
        self._threads = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="gloo")
        self._groups: list[ProcessGroupGloo] = []
        dist.Backend.register_backend(BACKEND, self._form, extended_api=True, devices="cpu")

    def interrupt(self) -> None:
        """Whoever forms a group or waits, or will, fails at once, until `allow`."""
        self._is_interrupted.set()

    def allow(self) -> None:
        """Groups may be formed and waited for again."""
        self._is_interrupted.clear()

    def clock(self, timeout_s: float) -> Clock:
        """Its waits can be interrupted.

        Args:
            timeout_s: of each of them.
        """
        return _InterruptibleClock(timeout_s, self)

    def call(self, do: Callable[[], Result], what: str) -> Result:
        """What `do` returns or raises.

        Raises:
            RankError: it was interrupted; `what` is named.
        """
        future = self._threads.submit(do)
        while not self._is_interrupted.is_set():
            try:
                return future.result(timeout=LOOK_EVERY_S)
            except TimeoutError:
                continue
        raise RankError(f"{what}: interrupted")

    def leave_world(self) -> None:
        """Give up all process groups, also after an attempt to make them that failed half-way; at once.

        torch numbers the groups of a process, and the numbers must fit those of processes that were
        never in a world; destroying the world sets them back, so after a failed attempt a world of one
        is made and destroyed. A group's connections are closed when all that is under way in it has ended.
        """
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        groups, self._groups = self._groups, []
        self._threads.submit(groups.clear)

    def _form(self, options: Any, backend_options: object) -> ProcessGroupGloo:
        """The creator that torch calls for every group.

        Raises:
            RankError: interrupted.
            RuntimeError: gloo's own, a peer that did not come in time.
        """
        del backend_options
        connect = partial(
            ProcessGroupGloo, options.store, options.group_rank, options.group_size, options.timeout
        )
        group = self.call(connect, f"the forming of group {options.group_id}")
        self._groups.append(group)
        return group


class _InterruptibleClock(Clock):
    def __init__(self, timeout_s: float, gloo: InterruptibleGloo) -> None:
        super().__init__(timeout_s)
        self._gloo = gloo

    def wait(self, work: dist.Work, awaited: Awaited) -> None:
        wait = partial(super().wait, work, awaited)
        if work.is_completed():
            wait()
        else:
            self._gloo.call(wait, awaited.what)


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
