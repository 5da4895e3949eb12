"""A device that queues work in streams, and a clock based on events in them."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.world.clock import Awaited, Channel, Clock, Stamp
from runtime.world.failure import RankError, first_line

LOOK_EVERY_S = 0.02
SETTLE_EVERY_S = 0.0002
GRACE_S = 10.0  # until a rank must have noticed that its communicators are aborted


class Event(Protocol):
    """A moment in a stream."""

    def query(self) -> bool:
        """Whether it has passed."""
        ...


class Streams(Protocol):
    """Interface of a device that queues work. The computation has a stream of its own."""

    def record(self) -> Event:
        """An event in the current stream."""
        ...

    def side_stream(self, channel: Channel, since: Event | None) -> AbstractContextManager[None]:
        """Context in which the channel's stream is current; it first waits for `since`."""
        ...

    def record_stream(self, tensor: Tensor, channel: Channel | None) -> None:
        """Keep a tensor's memory until the stream (None: the current one) has ended its current work."""
        ...

    def seconds_between(self, first: Event, last: Event) -> float:
        """Seconds between two events that have passed."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work has ended."""
        ...


class CudaStreams:
    """A GPU, with a stream of torch's pool for each channel.

    The pool has 32 streams. Channels that share a stream wait for each other unnecessarily, which only shifts
    recorded times: the computation waits for works, not for channels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Channel, torch.cuda.Stream] = {}

    def record(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def side_stream(self, channel: Channel, since: Event | None) -> Iterator[None]:
        stream = self._stream(channel)
        if since is not None:
            assert isinstance(since, torch.cuda.Event)
            stream.wait_event(since)
        with torch.cuda.stream(stream):
            yield

    def record_stream(self, tensor: Tensor, channel: Channel | None) -> None:
        tensor.record_stream(
            torch.cuda.current_stream(self._device) if channel is None else self._stream(channel)
        )

    def seconds_between(self, first: Event, last: Event) -> float:
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(last, torch.cuda.Event)
        return first.elapsed_time(last) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _stream(self, channel: Channel) -> torch.cuda.Stream:
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self._device)
        return self._streams[channel]


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait of the computation, or of a channel: from `since` (None: from the start) until `until`."""

    awaited: Awaited
    since: Event | None
    until: Event | None = None  # None: the host is still in the call
    seen_s: float | None = None  # when it was first observed

    @property
    def is_over(self) -> bool:
        return self.until is not None and self.until.query()

    @property
    def has_begun(self) -> bool:
        return self.since is None or self.since.query()


class Watch:
    """A thread that ends waits which take too long, by aborting the communicators.

    A device that waits for a peer cannot be interrupted, and calls on the host might never return; so a
    thread has to watch. A wait counts from when the stream reaches it, not from when it was queued. If the
    host itself is stuck in a call with operations in flight, what a channel carries counts as late.

    Args:
        timeout_s: of each wait.
        abort: aborts all communicators; waits for them fail or return.
        give_up: called with the error if the rank is still stuck some time after that.
    """

    def __init__(
        self,
        timeout_s: float,
        abort: Callable[[], None],
        give_up: Callable[[RankError], None] | None = None,
    ) -> None:
        self.error: RankError | None = None
        self._timeout_s, self._abort = timeout_s, abort
        self._give_up = give_up or _end_process
        self._waits: deque[_Wait] = deque()
        self._channels: dict[Channel, _Wait] = {}
        self._beat_s = 0.0
        self._is_reported, self._is_closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Record that the host makes progress."""
        self._beat_s = time.monotonic()

    def begin(self, awaited: Awaited, since: Event) -> _Wait:
        """Record the start of a wait of the computation."""
        wait = _Wait(awaited, since)
        self._waits.append(wait)
        self._start()
        return wait

    def carry(self, channel: Channel, awaited: Awaited, until: Event) -> None:
        """Record the last operation of a channel, which ends with `until`."""
        self._channels[channel] = _Wait(awaited, None, until)
        self.beat()
        self._start()

    @property
    def carried(self) -> list[_Wait]:
        """Operations of channels in flight."""
        return [wait for wait in list(self._channels.values()) if not wait.is_over]

    def await_channels(self) -> None:
        """At the end of a step, wait only for channels."""
        self._waits.extend(self.carried)
        self._start()

    def check(self) -> None:
        """Raise RankError if a wait was aborted."""
        if self.error is not None:
            self._is_reported.set()
            raise self.error

    def forget(self) -> None:
        """Drop all records, as nothing is in flight."""
        self._waits.clear()
        self._channels.clear()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            late = self._late()
            if late is not None:
                self.error = late.awaited.failed(f"nothing came within {self._timeout_s:g} s")
                self._abort()
                if not self._is_reported.wait(GRACE_S) and not self._is_closed.is_set():
                    self._give_up(self.error)
                return

    def _late(self) -> _Wait | None:
        """The late wait, if any; the computation waits for one at a time, so earlier ones have ended."""
        while self._waits and self._waits[0].is_over:
            self._waits.popleft()
        for wait in list(self._waits):
            if wait.is_over:
                continue
            if not wait.has_begun:
                break
            now_s = time.monotonic()
            wait.seen_s = now_s if wait.seen_s is None else wait.seen_s
            return wait if now_s - wait.seen_s > self._timeout_s else None
        is_stuck = time.monotonic() - self._beat_s > self._timeout_s
        return next(iter(self.carried), None) if is_stuck else None


def _end_process(error: RankError) -> None:
    """End the process: the last resort if the host is stuck in a call of the driver."""
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(1)


class StreamClock(Clock):
    """The clock of a device that queues work.

    Args:
        streams: of the device.
        watch: bounds the waits.
    """

    posts_before = False

    def __init__(self, streams: Streams, watch: Watch) -> None:
        super().__init__()
        self._streams, self._watch = streams, watch
        self._anchor: Event | None = None
        self._anchor_s = 0.0

    def start_step(self) -> float:
        self._watch.forget()
        self._streams.synchronize()
        self._anchor, self._anchor_s = self._streams.record(), time.perf_counter()
        return self._anchor_s

    def stamp(self) -> Event:
        self._watch.beat()
        return self._streams.record()

    def seconds(self, stamp: Stamp) -> float:
        """Seconds of an event; the host's own records are in seconds already."""
        if isinstance(stamp, float):
            return stamp
        assert self._anchor is not None, "a step has started"
        return self._anchor_s + self._streams.seconds_between(self._anchor, stamp)

    def side_stream(self, channel: Channel, since: Stamp) -> AbstractContextManager[None]:
        return self._streams.side_stream(channel, since)

    def follow(
        self, work: dist.Work, channel: Channel, awaited: Awaited, note: Callable[[Stamp], None]
    ) -> bool:
        with self._streams.side_stream(channel, None):
            self._within(work, awaited)
            end = self._streams.record()
        note(end)
        self._watch.carry(channel, awaited, end)
        return True

    def can_follow(self, work: dist.Work) -> bool:
        del work
        return True

    def record_stream(self, tensor: Tensor, channel: Channel | None = None) -> None:
        self._streams.record_stream(tensor, channel)

    def wait(self, work: dist.Work, awaited: Awaited) -> None:
        wait = self._watch.begin(awaited, self._streams.record())
        self._within(work, awaited)
        wait.until = self._streams.record()
        self._watch.check()

    def _within(self, work: dist.Work, awaited: Awaited) -> None:
        """Let the current stream wait; after an abort, the error names the wait that caused it."""
        try:
            work.wait()
        except RuntimeError as error:
            self._watch.check()
            raise awaited.failed(first_line(error)) from error

    def stamp_of(self, event: object) -> Stamp:
        return self.stamp() if event is None else event

    def scalar(self, tensor: Tensor) -> Tensor:
        return tensor

    def check(self) -> None:
        self._watch.check()

    def settle(self) -> None:
        end = self._streams.record()
        while not end.query():
            self._watch.check()
            self._watch.beat()
            time.sleep(SETTLE_EVERY_S)
        self._watch.await_channels()
        while self._watch.carried:
            self._watch.check()
            self._watch.beat()
            time.sleep(SETTLE_EVERY_S)
        self._watch.check()
        self._watch.forget()

    def close(self) -> None:
        """End the watching thread."""
        self._watch.close()
