"""Times communication between ranks: messages, collectives, and products that overlap a collective."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.measure.clock import Clock, quartile_spread, summary
from runtime.step.fsdp.weights import ShardedWeights
from runtime.world.tensor_collectives import GATHER, SCATTER
from workbench.calibrate.measurement import CollectiveRow, LinkRow, OverlapRow

ROUNDS = 5
TURNS = 5  # per round
WARMUP = 3
BYTES = tuple(2**i for i in (10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23, 24))
BEFORE_BYTES = 2**23  # more than a core's own cache
BEFORE_PRODUCT = 256
OVERLAP_BYTES = 2**25
OVERLAP_PRODUCT = {"cpu": 512, "cuda": 4096}
MOST_TURNS = 50  # products that overlap one collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The processes of a collective.

    Args:
        link: "intra" where all share a machine, else "inter".
        processes: of the world, ascending.
        process: this one.
        group: their process group; None: the whole world.
    """

    link: str
    processes: tuple[int, ...]
    process: int
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.processes)


def time_messages(clock: Clock, ring: Ring) -> list[LinkRow]:
    """Time half a round trip between first and last process, by isend and irecv as in the executor."""
    first, last = ring.processes[0], ring.processes[-1]

    def round_trip(buffer: Tensor) -> None:
        if ring.process == first:
            _not_none(dist.isend(buffer, last, group=ring.group, tag=1)).wait()
            _not_none(dist.irecv(buffer, last, group=ring.group, tag=2)).wait()
        elif ring.process == last:
            _not_none(dist.irecv(buffer, first, group=ring.group, tag=1)).wait()
            _not_none(dist.isend(buffer, first, group=ring.group, tag=2)).wait()

    return [
        LinkRow(
            link=ring.link,
            num_bytes=num_bytes,
            seconds=least_median(seconds) / 2,
            spread=quartile_spread(seconds),
        )
        for num_bytes, seconds in _in_turn(clock, ring, lambda buffer: lambda: round_trip(buffer))
    ]


def time_collective(clock: Clock, ring: Ring, collective: str) -> list[CollectiveRow]:
    """Time one kind of collective among the ring's processes, by bytes of the whole tensor."""
    make = COLLECTIVES[collective]
    return [
        CollectiveRow(
            collective=collective,
            link=ring.link,
            num_ranks=ring.size,
            num_bytes=num_bytes,
            **summary(seconds),
        )
        for num_bytes, seconds in _in_turn(
            clock, ring, lambda buffer: make(buffer, ring), _work_before(clock)
        )
    ]


def _work_before(clock: Clock) -> Callable[[], object]:
    """Work before a collective, which evicts its tensors from a core's own cache, as layers do.

    A GPU's collectives overlap layers, in streams and engines of their own: they are timed alone.
    """
    if clock.is_cuda:
        return clock.wait
    x = torch.randn(BEFORE_PRODUCT, BEFORE_PRODUCT)
    y, read, written = torch.empty_like(x), torch.randn(BEFORE_BYTES // 4), torch.empty(BEFORE_BYTES // 4)

    def work() -> None:
        torch.mm(x, x, out=y)
        written.copy_(read)

    return work


def _all_reduce(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffer, group=ring.group)


def _all_gather(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    part = buffer.chunk(ring.size)[ring.processes.index(ring.process)].clone()
    return lambda: GATHER(buffer, part, group=ring.group)


def _reduce_scatter(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    part = torch.empty_like(buffer.chunk(ring.size)[0])
    return lambda: SCATTER(part, buffer, group=ring.group)


def _broadcast(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    return lambda: dist.broadcast(buffer, ring.processes[0], group=ring.group)


def _all_to_all(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    received = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(received, buffer, group=ring.group)


def _parameters_gather(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    """An all-gather of sharded parameters, and their release."""
    sharded = ShardedWeights([nn.Parameter(buffer)], ring.processes, ring.process, ring.group)

    def gather() -> None:
        in_flight = sharded.gather()
        in_flight.work.wait()
        sharded.release()

    return gather


def _parameters_scatter(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    """A reduce-scatter of gradients of sharded parameters, added to those of the previous round."""
    gradient, weight = torch.randn_like(buffer), nn.Parameter(buffer)
    sharded = ShardedWeights([weight], ring.processes, ring.process, ring.group)

    def scatter() -> None:
        weight.grad = gradient
        in_flight = sharded.reduce_scatter()
        in_flight.work.wait()
        received = in_flight.received()
        assert received is not None
        sharded.add(received)

    return scatter


COLLECTIVES: dict[str, Callable[[Tensor, Ring], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "parameters_gather": _parameters_gather,
    "parameters_scatter": _parameters_scatter,
}


def _in_turn(
    clock: Clock,
    ring: Ring,
    make: Callable[[Tensor], Callable[[], object]],
    before: Callable[[], object] = lambda: None,
) -> list[tuple[int, list[float]]]:
    """Seconds by size; sizes alternate, so that disturbances affect all of them alike.

    Before each call, all processes leave a barrier, some later than others, and run `before`. The call is
    timed from the process's own start: the last process to start measures the call alone. So the minimum over
    processes counts, per call.
    """
    calls = {}
    for size in BYTES:
        elements = max(ring.size, size // 4 // ring.size * ring.size)
        calls[size] = make(torch.randn(elements, device=clock.device))
    seconds_by_size: dict[int, list[float]] = {size: [] for size in BYTES}
    for turn in range(WARMUP + ROUNDS * TURNS):
        for size in BYTES:
            dist.barrier(group=ring.group)
            before()
            clock.wait()
            second = clock.time_s(calls[size])
            if turn >= WARMUP:
                seconds_by_size[size].append(second)
    return list(zip(seconds_by_size, _least(clock, ring, list(seconds_by_size.values())), strict=True))


def least_median(seconds: Sequence[float]) -> float:
    """The minimum of the rounds' medians.

    Occasionally the transport's own thread waits for a time slice of a core that a rank computes on: a call
    of a tenth of a millisecond then takes three to five. Where that happens in half of the calls, their
    median is one or the other at random; the minimum of several medians is the undisturbed call.
    """
    rounds = [seconds[first : first + TURNS] for first in range(0, len(seconds), TURNS)]
    return min(statistics.median(seconds_of_round) for seconds_of_round in rounds)


def _least(clock: Clock, ring: Ring, seconds: list[list[float]]) -> list[list[float]]:
    table = torch.tensor(seconds, dtype=torch.float64, device=clock.device)
    dist.all_reduce(table, op=dist.ReduceOp.MIN, group=ring.group)
    least: list[list[float]] = table.tolist()
    return least


def time_overlap(clock: Clock, ring: Ring) -> list[OverlapRow]:
    """Time a product alone, and repeatedly while an all-reduce is in flight."""
    size = OVERLAP_PRODUCT[clock.device.type]
    x, w = (torch.randn(size, size, device=clock.device) for _ in range(2))
    buffer = torch.randn(OVERLAP_BYTES // 4, device=clock.device)
    out = torch.empty_like(x)

    def product() -> None:
        torch.mm(x, w, out=out)

    alone: list[float] = []
    beside: list[float] = []
    for turn in range(WARMUP + ROUNDS):
        alone += clock.repeat(product, 0.0)  # in every round, so that both see the same disturbances
        dist.barrier(group=ring.group)
        clock.wait()
        work = _not_none(dist.all_reduce(buffer, group=ring.group, async_op=True))
        seconds: list[float] = []
        while len(seconds) < MOST_TURNS:
            second = clock.time_s(product)
            if work.is_completed():  # this product ran partly alone
                break
            seconds.append(second)
        work.wait()
        if turn >= WARMUP:
            beside += seconds
    if not beside:
        return []
    return [
        OverlapRow(
            collective="all_reduce",
            link=ring.link,
            num_ranks=ring.size,
            num_bytes=OVERLAP_BYTES,
            alone_s=statistics.median(alone),
            beside_s=statistics.median(beside),
            spread=quartile_spread(beside),
        )
    ]


def _not_none(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
