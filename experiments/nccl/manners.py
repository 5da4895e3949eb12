"""A device of the host that queues communication as NCCL does, over gloo.

Computations are done when a call returns; sends and sums are queued. The computation's stream is the host's
thread: where that stream waits, the host blocks, as a GPU would.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

import runtime.parallel.context.group
import runtime.world.mesh
from runtime.step.fsdp import weights
from runtime.world.clock import Channel
from runtime.world.streams import Event
from runtime.world.tensor_collectives import GATHER, SCATTER

LOOK_EVERY_S = 0.002
ENOUGH_S = 3600.0  # no rank of a case lives that long
GREETING = 1 << 20  # a tag that no row has


class Manner(Enum):
    """A behaviour of NCCL that gloo does not have."""

    DEVICE_WAIT = "a wait for the device waits for posted receives, and any action may make one"
    FIRST_USE = "the first send or receive of a communicator blocks the host until the peer comes"
    EARLY_FUTURES = "futures complete when a work is queued; its data are there when a stream has waited"
    ENDLESS_WAITS = "waits ignore timeouts, and never hear of a peer that is gone"


ALL = frozenset(Manner)


class Started(NamedTuple):
    """gloo's work, and tensor -> buffer that gloo writes."""

    work: dist.Work
    results: Sequence[tuple[Tensor, Tensor]]


class Queued:
    """A queued work.

    Args:
        device: of this rank.
        start: called at once, or behind others.
        behind: works whose ends the current stream waits for; their results are there when this one starts.
        before: the work before this one in its group, if that has not started.
    """

    def __init__(
        self,
        device: "QueuingDevice",
        start: Callable[[], Started],
        behind: Sequence["Queued"] = (),
        before: "Queued | None" = None,
    ):
        self._device, self._start, self._behind, self._before = device, start, behind, before
        self._started = None if behind or before else start()
        self.has_started = threading.Event()
        self.error: RuntimeError | None = None
        self.is_shown = False  # whether some stream has waited for it
        self._showing = threading.Lock()
        self.is_done = threading.Event()
        self.done_s = 0.0
        threading.Thread(target=self._carry, name="nccl", daemon=True).start()

    def _carry(self) -> None:
        try:
            for work in self._behind:
                work.is_done.wait()
                work.show()
            if self._before is not None:
                self._before.has_started.wait()
            if self._started is None:
                self._started = self._start()
            self.has_started.set()
            self._started.work.wait()
        except RuntimeError as error:
            self.error = error
            if Manner.ENDLESS_WAITS in self._device.manners:
                return
        self.done_s = time.perf_counter()
        self.is_done.set()

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait; RuntimeError where the communicators were aborted."""
        del timeout
        if self._device.lane is not None:
            self._device.lane.append(self)
            return True
        while not self.is_done.wait(LOOK_EVERY_S):
            self._device.check()
        if self.error is not None:
            raise self.error
        self.show()
        return True

    def show(self) -> None:
        """Make gloo's results visible to the computation."""
        assert self._started is not None, "it has ended"
        with self._showing, torch.no_grad():
            for tensor, written in self._started.results:
                tensor.detach().copy_(written)
            self._started = self._started._replace(results=())
            self.is_shown = True

    def get_future(self) -> "Future[None]":
        """A future that is done at once, as NCCL's: reading the data then is too early."""
        future: Future[None] = Future()
        if Manner.EARLY_FUTURES not in self._device.manners:
            self.wait()
        future.set_result(None)
        return future


class Moment:
    """An event, passed when all earlier works of its lane are done."""

    def __init__(self, works: Sequence[Queued]) -> None:
        self._works, self._time_s = tuple(works), time.perf_counter()

    def query(self) -> bool:
        return all(work.is_done.is_set() for work in self._works)

    @property
    def time_s(self) -> float:
        return max([self._time_s, *(work.done_s for work in self._works)])


class QueuingDevice:
    """Streams for `runtime.world.streams`, and works as torch.distributed returns them.

    Args:
        manners: the behaviours that it emulates.
    """

    def __init__(self, manners: frozenset[Manner]) -> None:
        self.manners = manners
        self._lanes: dict[Channel, list[Queued]] = {}
        self._receives: list[Queued] = []
        self._sums: dict[object, Queued] = {}  # the last of each group
        self._known: set[tuple[object, frozenset[int]]] = set()
        self._current = threading.local()
        self._is_aborted = threading.Event()

    # ---- streams ----

    @property
    def lane(self) -> list[Queued] | None:
        """The current stream if it is a channel's; None: the computation's."""
        lane: list[Queued] | None = getattr(self._current, "lane", None)
        return lane

    def record(self) -> Moment:
        if self.lane is None and Manner.DEVICE_WAIT in self.manners:
            self.synchronize()
        return Moment([] if self.lane is None else self.lane)

    @contextmanager
    def side_stream(self, channel: Channel, since: object) -> Iterator[None]:
        del since  # the computation is never behind the host
        before = self.lane
        self._current.lane = self._lanes.setdefault(channel, [])
        try:
            yield
        finally:
            self._current.lane = before

    def record_stream(self, tensor: Tensor, channel: Channel | None) -> None:
        """Does nothing: gloo manages the memory."""

    def seconds_between(self, first: Event, last: Event) -> float:
        assert isinstance(first, Moment)
        assert isinstance(last, Moment)
        return last.time_s - first.time_s

    def synchronize(self) -> None:
        """Wait for all receives that are posted.

        Not for sends, since those of these small models fit into NCCL's buffers. Nor for collectives: a rank
        with nothing to add starts a sum long before its peers, and continues.
        """
        while self._receives:
            while not self._receives[0].is_done.wait(LOOK_EVERY_S):
                self.check()
            self._receives.pop(0)

    # ---- communicators ----

    def abort(self) -> None:
        """End all waits."""
        self._is_aborted.set()

    def check(self) -> None:
        """Raise RuntimeError after `abort`."""
        if self._is_aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")

    def queue(self, start: Callable[..., dist.Work | None], outputs: Sequence[Tensor]) -> Queued:
        """Start gloo's work; it writes into the tensors that `start` is called with instead of `outputs`."""
        self.check()
        return Queued(self, lambda: self._started(start, outputs))

    def queue_sum(self, start: Callable[..., dist.Work | None], tensor: Tensor, group: object) -> Queued:
        """As `queue`, behind what the current stream waits for; sums of a group start in their order."""
        self.check()
        last = self._sums.get(group)
        before = None if last is None or last.has_started.is_set() else last
        behind = tuple(work for work in self.lane or () if not work.is_shown)
        self._sums[group] = Queued(self, lambda: self._started(start, [tensor]), behind, before)
        return self._sums[group]

    def _started(self, start: Callable[..., dist.Work | None], outputs: Sequence[Tensor]) -> Started:
        early = Manner.EARLY_FUTURES in self.manners
        written = [output.detach().clone() if early else output for output in outputs]
        work = start(*written)
        assert work is not None, "this rank is in the group"
        if early:
            for output in outputs:
                _poison(output)
        return Started(work, list(zip(outputs, written, strict=True)) if early else [])

    def receive(self, start: Callable[..., dist.Work | None], tensor: Tensor) -> Queued:
        """As `queue`; a wait for the device also waits for it."""
        queued = self.queue(start, [tensor])
        self._receives.append(queued)
        return queued

    def meet(self, group: dist.ProcessGroup | None, peer: int) -> None:
        """Rendezvous before a send or receive: the first of the two in a group waits for the other."""
        pair = (group, frozenset((dist.get_rank(), peer)))
        if Manner.FIRST_USE not in self.manners or pair in self._known:
            return
        self._known.add(pair)
        own_tensor, peer_tensor = torch.zeros(1), torch.zeros(1)
        works = [
            REAL["isend"](own_tensor, peer, group=group, tag=GREETING),
            REAL["irecv"](peer_tensor, peer, group=group, tag=GREETING),
        ]
        for work in works:
            assert work is not None
            done = Queued(self, partial(Started, work, []))
            while not done.is_done.wait(LOOK_EVERY_S):
                self.check()


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        data = tensor.detach()
        data.fill_(float("nan") if data.is_floating_point() else torch.iinfo(data.dtype).min)


REAL: Mapping[str, Callable[..., Any]] = {
    name: getattr(dist, name) for name in ("isend", "irecv", "all_reduce", "all_gather", "all_to_all_single")
}
REAL_GATHER, REAL_SCATTER = GATHER, SCATTER


class PeerOperation(NamedTuple):
    """Like torch's P2POp, which accepts only torch's own functions."""

    op: Callable[..., Any]
    tensor: Tensor
    group: dist.ProcessGroup | None
    peer: int


class Communication:
    """torch.distributed's functions, as the runtime uses them, queued on a device.

    Host communication without `async_op` stays gloo's, as it does beside NCCL.
    """

    def __init__(self, device: QueuingDevice) -> None:
        self._device = device

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Queued:
        del tag  # rows meet by their order
        self._device.meet(group, dst)
        return self._device.queue(lambda: REAL["isend"](tensor, dst, group=group), [])

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Queued:
        del tag
        self._device.meet(group, src)
        return self._device.receive(lambda into: REAL["irecv"](into, src, group=group), tensor)

    def all_reduce(self, tensor: Tensor, *how: Any, **named: Any) -> Queued | None:
        if not named.get("async_op"):
            REAL["all_reduce"](tensor, *how, **named)
            return None
        group = named.get("group")
        return self._device.queue_sum(lambda into: REAL["all_reduce"](into, *how, **named), tensor, group)

    def all_gather(self, into: list[Tensor], own: Tensor, **named: Any) -> Queued:
        return self._device.queue(lambda *parts: REAL["all_gather"](list(parts), own, **named), into)

    def all_to_all_single(self, into: Tensor, own: Tensor, *counts: Any, **named: Any) -> Queued:
        return self._device.queue(lambda part: REAL["all_to_all_single"](part, own, *counts, **named), [into])

    def gather(self, whole: Tensor, part: Tensor, **named: Any) -> Queued:
        return self._device.queue(lambda into: REAL_GATHER(into, part, **named), [whole])

    def scatter(self, part: Tensor, whole: Tensor, **named: Any) -> Queued:
        return self._device.queue(lambda into: REAL_SCATTER(into, whole, **named), [part])

    def batch(self, operations: Sequence[PeerOperation]) -> list[Queued]:
        return [each.op(each.tensor, each.peer, group=each.group) for each in operations]


def _operation(op: Callable[..., Any], tensor: Tensor, *, group: Any, group_peer: int) -> PeerOperation:
    return PeerOperation(op, tensor, group, dist.get_global_rank(group, group_peer))


@contextmanager
def well_mannered(device: QueuingDevice) -> Iterator[None]:
    """In this context, the process's sends and sums are queued on the device."""
    ours = Communication(device)
    instead: Mapping[str, Callable[..., Any]] = {
        "isend": ours.isend,
        "irecv": ours.irecv,
        "all_reduce": ours.all_reduce,
        "all_gather": ours.all_gather,
        "all_to_all_single": ours.all_to_all_single,
        "P2POp": _operation,
        "batch_isend_irecv": ours.batch,
    }
    with ExitStack() as stack:
        for name, function in instead.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        for module in (runtime.world.mesh, runtime.parallel.context.group, weights):
            stack.enter_context(mock.patch.object(module, "GATHER", ours.gather))
            stack.enter_context(mock.patch.object(module, "SCATTER", ours.scatter))
        stack.enter_context(mock.patch.object(weights, "tells_scattered", return_value=True))
        yield
