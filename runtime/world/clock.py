"""Time on a rank's device, and waits of its computation for other ranks.

On a CPU a call returns when its work is done: the host waits, and its clock gives the times. On a GPU a call
only queues work: the device waits, and events in its streams give the times, which are read at the end of a
step.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.world.failure import RankError, first_line

Stamp = Any  # a point in time, which its clock converts to seconds


class Traffic(Enum):
    """Kinds of traffic of a channel."""

    RECEIVE = "receive"
    SEND = "send"
    SUM = "all-reduce"
    SCATTER = "reduce-scatter"
    GATHER = "all-gather"


class Channel(NamedTuple):
    """A communicator of a rank: its operations end in the order in which they were started."""

    traffic: Traffic
    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a rank waits for, as in its error message.

    Args:
        what: names the rank, its activity, and what has not arrived.
        peers: ranks that it waits for.
    """

    what: str
    peers: tuple[int, ...]

    @classmethod
    def among(cls, rank: int, what: str, ranks: Iterable[int]) -> "Awaited":
        """An activity of a rank with all others of a group."""
        peers = tuple(other for other in ranks if other != rank)
        return cls(f"rank {rank} {what} with ranks {list(peers)}", peers)

    def failed(self, reason: str) -> RankError:
        return RankError(f"{self.what}: {reason}", peers=self.peers)


class Clock:
    """Time and waits on one rank's device; of this class, calls return when their work is done.

    Args:
        timeout_s: of each wait; None: the process group's own.

    Attributes:
        posts_before: whether a receive must be posted before the action that it overlaps is issued, as where
            issuing an action executes it. Where actions are queued, a receive is posted after everything that
            this rank must send before the peer can answer: then no operation in flight depends on work that
            the host has yet to issue, and a wait for the whole device, which a driver may do in any
            allocation or first launch of a kernel, cannot deadlock.
    """

    posts_before = True

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)

    def start_step(self) -> float:
        """Start a step, with nothing in flight; returns seconds on the machine's monotonic clock."""
        return float(self.stamp())

    def stamp(self) -> Stamp:
        """A stamp of now, in the order of this rank's computation."""
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        """Seconds of a stamp on the machine's monotonic clock, once the step is settled."""
        return float(stamp)

    def side_stream(self, channel: Channel, since: Stamp) -> AbstractContextManager[None]:
        """Context in which started operations do not wait for computation after `since`."""
        del channel, since
        return nullcontext()

    def follow(
        self, work: dist.Work, channel: Channel, awaited: Awaited, note: Callable[[Stamp], None]
    ) -> bool:
        """Call `note` when a work ends; returns False where its end can only be waited for.

        gloo reports only the end of sums and gathers, in a callback on a thread of its own.
        """
        del awaited
        if channel.traffic not in {Traffic.SUM, Traffic.GATHER}:
            return False
        work.get_future().add_done_callback(lambda _: note(self.stamp()))
        return True

    def can_follow(self, work: dist.Work) -> bool:
        """Whether operations that are started now follow a work without a wait of the computation.

        Here it must have ended; a device that queues work lets its side streams wait.
        """
        return bool(work.is_completed())

    def record_stream(self, tensor: Tensor, channel: Channel | None = None) -> None:
        """Keep a tensor's memory while a channel (None: the computation) of another stream uses it.

        Nothing to do here: all work is in one order, and waiting for a send keeps its tensor alive.
        """

    def wait(self, work: dist.Work, awaited: Awaited) -> None:
        """Let later computation wait for a work.

        Raises:
            RankError: it failed, or did not end in time.
        """
        try:
            if self._timeout is None:
                work.wait()
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise awaited.failed(first_line(error)) from error

    def stamp_of(self, event: object) -> Stamp:
        """The stamp of an event in another stream; `event` is given on GPUs."""
        del event
        return self.stamp()

    def scalar(self, tensor: Tensor) -> Tensor | float:
        """The value of a tensor of one element if it can be read without waiting, else the tensor."""
        return float(tensor)

    def check(self) -> None:
        """Raise RankError if a wait was aborted, as later failures follow from it."""

    def settle(self) -> None:
        """At the end of a step, wait until all computation and followed works have ended.

        Raises:
            RankError: a work failed, or did not end in time.
        """

    def close(self) -> None:
        """Release resources after the rank's last step."""


class SynchronousClock(Clock):
    """The clock of a GPU that synchronises at every stamp, for actions timed alone, as in emulation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def stamp(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def follow(
        self, work: dist.Work, channel: Channel, awaited: Awaited, note: Callable[[Stamp], None]
    ) -> bool:
        """As `Clock.follow`; sends end at once, and a thread that waits for them would disturb timings."""
        if channel.traffic is not Traffic.SEND:
            return super().follow(work, channel, awaited, note)
        note(self.stamp())
        return True


HOST = Clock()
