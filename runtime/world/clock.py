"""When things happen on a rank's device, and how its computation waits for what other ranks send.

On a CPU a call returns when its work is done: the host waits, and the host's clock says when. On a GPU
a call only queues work: the device waits, and events in its streams say when, read at the end of a step.
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

Stamp = Any  # a moment; its clock turns it into seconds


class Traffic(Enum):
    """What goes over a channel."""

    RECEIVE = "receive"
    SEND = "send"
    SUM = "all-reduce"
    SCATTER = "reduce-scatter"
    GATHER = "all-gather"


class Channel(NamedTuple):
    """A communicator, as its rank uses it: what it carries ends in the order in which it was started."""

    traffic: Traffic
    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a rank waits for, in the words of its error.

    Args:
        what: names the rank, what it does, and what has not come.
        peers: ranks that it waits for.
    """

    what: str
    peers: tuple[int, ...]

    @classmethod
    def among(cls, rank: int, what: str, ranks: Iterable[int]) -> "Awaited":
        """What a rank does with all others of a group."""
        peers = tuple(other for other in ranks if other != rank)
        return cls(f"rank {rank} {what} with ranks {list(peers)}", peers)

    def failed(self, reason: str) -> RankError:
        return RankError(f"{self.what}: {reason}", peers=self.peers)


class Clock:
    """One rank's device, as far as time and waiting go; this one has done its work when the call returns.

    Args:
        timeout_s: of a wait; None: the process group's own.

    Attributes:
        posts_before: whether a receive must be posted before the action that it overlaps with is issued. So
            it is where issuing an action is doing it. Where actions are queued, a receive is posted after
            all that this rank still has to send before the peer can answer: then nothing that is under way
            ever needs what the host has yet to issue, and a wait for the whole device, which a driver may
            make in any allocation or first launch of a kernel, cannot deadlock.
    """

    posts_before = True

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)

    def start_step(self) -> float:
        """Nothing is under way: begin to count. Seconds on the machine's monotonic clock."""
        return float(self.stamp())

    def stamp(self) -> Stamp:
        """Now, in the order of what this rank computes."""
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        """A stamp on the machine's monotonic clock, once the step is settled."""
        return float(stamp)

    def side_stream(self, channel: Channel, since: Stamp) -> AbstractContextManager[None]:
        """What is started inside waits for nothing that was computed after `since`."""
        del channel, since
        return nullcontext()

    def follow(
        self, work: dist.Work, channel: Channel, awaited: Awaited, note: Callable[[Stamp], None]
    ) -> bool:
        """Note when a work ends; False where nobody can tell but who waits for it.

        gloo tells the end of sums and gathers alone, in a callback on a thread of its own.
        """
        del awaited
        if channel.traffic not in {Traffic.SUM, Traffic.GATHER}:
            return False
        work.get_future().add_done_callback(lambda _: note(self.stamp()))
        return True

    def record_stream(self, tensor: Tensor, channel: Channel | None = None) -> None:
        """A channel (None: the computation) uses a tensor of another stream: its memory stays until then.

        Nothing to do: there is one order of all work, and whoever waits for a send holds the tensor.
        """

    def wait(self, work: dist.Work, awaited: Awaited) -> None:
        """What is computed from now on comes after the work.

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
        """The stamp of what somebody queued in a stream of his own; `event` is there on GPUs."""
        del event
        return self.stamp()

    def scalar(self, tensor: Tensor) -> Tensor | float:
        """What a tensor of one element holds, where reading it makes nobody wait; else the tensor."""
        return float(tensor)

    def check(self) -> None:
        """Raises RankError when a wait was ended: what has failed since then follows from it."""

    def settle(self) -> None:
        """At the end of a step: wait until all that was computed and followed has ended.

        Raises:
            RankError: something that was waited for failed, or did not come in time.
        """

    def close(self) -> None:
        """The rank's last step is over."""


class SynchronousClock(Clock):
    """Of a GPU that is waited for at every stamp: for actions timed alone, as an emulation's are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def stamp(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def follow(
        self, work: dist.Work, channel: Channel, awaited: Awaited, note: Callable[[Stamp], None]
    ) -> bool:
        """Sends are over when they are made; a thread that waited for them would disturb what is timed."""
        if channel.traffic is not Traffic.SEND:
            return super().follow(work, channel, awaited, note)
        note(self.stamp())
        return True


HOST = Clock()
