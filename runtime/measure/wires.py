"""Times what ranks say to each other: messages, collectives, and products beside a collective."""

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
TURNS = 5  # of a round
WARMUP = 3
BYTES = tuple(2**i for i in (10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23, 24))
BEFORE_BYTES = 2**23  # more than a core's own cache
BEFORE_PRODUCT = 256
OVERLAP_BYTES = 2**25
OVERLAP_PRODUCT = {"cpu": 512, "cuda": 4096}
MOST_TURNS = 50  # products beside one collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Processes that a collective joins.

    Args:
        link: "intra" where all share a machine, else "inter".
        processes: of the world, ascending.
        process: this one.
        group: None: the whole world.
    """

    link: str
    processes: tuple[int, ...]
    process: int
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.processes)


def time_messages(clock: Clock, ring: Ring) -> list[LinkRow]:
    """Half of a round trip between first and last process, as the executor sends: isend and irecv."""
    first, last = ring.processes[0], ring.processes[-1]

    def round_trip(buffer: Tensor) -> None:
        if ring.process == first:
            _must(dist.isend(buffer, last, group=ring.group, tag=1)).wait()
            _must(dist.irecv(buffer, last, group=ring.group, tag=2)).wait()
        elif ring.process == last:
            _must(dist.irecv(buffer, first, group=ring.group, tag=1)).wait()
            _must(dist.isend(buffer, first, group=ring.group, tag=2)).wait()

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
    """One kind of collective among the ring's processes, by bytes of the whole tensor."""
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
    """What ranks do before a collective: layers, which leave none of its tensors in a core's own cache.

    A GPU's collectives run beside them, in streams and engines of their own: they are timed alone.
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
    mine = buffer.chunk(ring.size)[ring.processes.index(ring.process)].clone()
    return lambda: GATHER(buffer, mine, group=ring.group)


def _reduce_scatter(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    mine = torch.empty_like(buffer.chunk(ring.size)[0])
    return lambda: SCATTER(mine, buffer, group=ring.group)


def _broadcast(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    return lambda: dist.broadcast(buffer, ring.processes[0], group=ring.group)


def _all_to_all(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    received = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(received, buffer, group=ring.group)


def _parameters_gather(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    """Sharded parameters made whole, and let go."""
    sharded = ShardedWeights([nn.Parameter(buffer)], ring.processes, ring.process, ring.group)

    def gather() -> None:
        travelling = sharded.gather()
        travelling.work.wait()
        sharded.let_go()

    return gather


def _parameters_scatter(buffer: Tensor, ring: Ring) -> Callable[[], object]:
    """Gradients of sharded parameters added up: over the ranks, and to those of the round before."""
    gradient, weight = torch.randn_like(buffer), nn.Parameter(buffer)
    sharded = ShardedWeights([weight], ring.processes, ring.process, ring.group)

    def scatter() -> None:
        weight.grad = gradient
        travelling = sharded.reduce_scatter()
        travelling.work.wait()
        assert travelling.part is not None
        sharded.add(travelling.part)

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
    """Seconds by size; sizes take turns, so that a disturbance falls on all of them alike.

    All processes leave a barrier before each call, some later than others, do what comes `before` it, and the
    call's clock runs from the process's own start: the one that came last sees the call alone. So the least
    of all processes counts, call by call.
    """
    calls = {}
    for size in BYTES:
        elements = max(ring.size, size // 4 // ring.size * ring.size)
        calls[size] = make(torch.randn(elements, device=clock.device))
    found: dict[int, list[float]] = {size: [] for size in BYTES}
    for turn in range(WARMUP + ROUNDS * TURNS):
        for size in BYTES:
            dist.barrier(group=ring.group)
            before()
            clock.wait()
            second = clock.time_s(calls[size])
            if turn >= WARMUP:
                found[size].append(second)
    return list(zip(found, _least(clock, ring, list(found.values())), strict=True))


def least_median(seconds: Sequence[float]) -> float:
    """The least of the rounds' medians.

    Now and then the transport's own thread waits for a slice of a core that a rank computes on: a
    call of a tenth of a millisecond then takes three to five. Where that happens in half of the calls, their
    median is either of the two at random; the least of several medians is the call undisturbed.
    """
    rounds = [seconds[first : first + TURNS] for first in range(0, len(seconds), TURNS)]
    return min(statistics.median(found) for found in rounds)


def _least(clock: Clock, ring: Ring, seconds: list[list[float]]) -> list[list[float]]:
    table = torch.tensor(seconds, dtype=torch.float64, device=clock.device)
    dist.all_reduce(table, op=dist.ReduceOp.MIN, group=ring.group)
    least: list[list[float]] = table.tolist()
    return least


def time_overlap(clock: Clock, ring: Ring) -> list[OverlapRow]:
    """A product alone, and again and again while an all-reduce is under way."""
    size = OVERLAP_PRODUCT[clock.device.type]
    x, w = (torch.randn(size, size, device=clock.device) for _ in range(2))
    buffer = torch.randn(OVERLAP_BYTES // 4, device=clock.device)
    out = torch.empty_like(x)

    def product() -> None:
        torch.mm(x, w, out=out)

    alone: list[float] = []
    beside: list[float] = []
    for turn in range(WARMUP + ROUNDS):
        alone += clock.repeat(product, 0.0)  # in every round: both meet the same disturbances
        dist.barrier(group=ring.group)
        clock.wait()
        work = _must(dist.all_reduce(buffer, group=ring.group, async_op=True))
        seconds: list[float] = []
        while len(seconds) < MOST_TURNS:
            second = clock.time_s(product)
            if work.is_completed():  # this product was alone for a while
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


def _must(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
