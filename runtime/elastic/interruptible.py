"""A gloo world that a process can leave at any time, whatever gloo waits for."""

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
MOST_CALLS = 256  # concurrent ones, including abandoned ones

Result = TypeVar("Result")


class InterruptibleGloo:
    """Runs calls of gloo in threads of their own, which are abandoned when the calls are interrupted.

    gloo cannot abort a wait. While it connects a group it does not notice that a peer has died: it waits for
    the peer to connect, or retries. And when a connection breaks, it notifies all waiting operations but the
    one whose message is partly transferred (its `Pair::signalException` skips the operation that is being
    written or read). Each of those ends only with its timeout, and a group ends when all its operations have
    ended. Abandoned threads share nothing with later groups.
    """

    def __init__(self) -> None:
        self._is_interrupted = Event()
        self._threads = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="gloo")
        self._groups: list[ProcessGroupGloo] = []
        dist.Backend.register_backend(BACKEND, self._form, extended_api=True, devices="cpu")

    def interrupt(self) -> None:
        """Let calls that form a group or wait fail at once, now and until `allow`."""
        self._is_interrupted.set()

    def allow(self) -> None:
        """Permit forming groups and waiting again."""
        self._is_interrupted.clear()

    def clock(self, timeout_s: float) -> Clock:
        """A clock whose waits can be interrupted.

        Args:
            timeout_s: of each wait.
        """
        return _InterruptibleClock(timeout_s, self)

    def call(self, do: Callable[[], Result], what: str) -> Result:
        """Call `do` in a thread; returns and raises as it does.

        Raises:
            RankError: the call was interrupted; the message has `what`.
        """
        future = self._threads.submit(do)
        while not self._is_interrupted.is_set():
            try:
                return future.result(timeout=LOOK_EVERY_S)
            except TimeoutError:
                continue
        raise RankError(f"{what}: interrupted")

    def leave_world(self) -> None:
        """Abandon all process groups at once, also after a failed attempt to form them.

        torch numbers the groups of a process, and the numbers must agree with those of processes that were
        never in a world; destroying the world resets them, so after a failed attempt a world of one is formed
        and destroyed. A group's connections are closed when all its operations have ended.
        """
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        groups, self._groups = self._groups, []
        self._threads.submit(groups.clear)

    def _form(self, options: Any, backend_options: object) -> ProcessGroupGloo:
        """Create a group; torch calls this for every one.

        Raises:
            RankError: interrupted.
            RuntimeError: from gloo, for a peer that did not connect in time.
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
    """Inodes of this process's open sockets; those from before any world must not be closed."""
    return frozenset(inode for inode, _ in _sockets())


def sever(spared: frozenset[int]) -> None:
    """Shut down the internet connections of this process; waits on them fail at once, at both ends.

    gloo cannot abort a wait, and a rank that waits for a living one notices a death elsewhere only by its
    timeout. Listening sockets are left open: gloo's listener would end the process.

    Args:
        spared: inodes of sockets to leave open.
    """
    for inode, connection in _sockets():
        with suppress(OSError):
            is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            is_listener = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_internet and not is_listener and inode not in spared:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, a handle of its own) of every socket."""
    for path in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # closed in the meantime
            status = os.fstat(int(path.name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as handle:
                    yield status.st_ino, handle
