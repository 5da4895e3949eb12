"""A mesh whose ranks are threads of one process: what they say to each other stays in memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from runtime.emulation.turn import Runner, Turns
from runtime.world.failure import RankError
from runtime.world.mesh import Mesh
from workbench.plan.lowered import Transfer

Payload = Any  # what one rank brings to a collective
Combine = Callable[[Mapping[int, Payload]], None]


class CollectiveKind:
    """Names of collectives, as they stand in messages and in the log of exchanges."""

    ALIGN = "the start of a step"
    GRADIENTS = "a gradient sum"
    PARTS = "a sum of parts of gradients"
    WEIGHTS = "a collection of updated weights"
    MATRICES = "an exchange of matrices"
    NORM = "the clipping norm"
    SUM = "all_reduce"
    GATHER = "all_gather"
    SCATTER = "reduce_scatter"
    EXCHANGE = "all_to_all"
    PASS_ON = "ring"


@dataclass(slots=True)
class Rendezvous:
    """A collective: done when all ranks have brought their part."""

    kind: str
    ranks: tuple[int, ...]
    combine: Combine
    parts: dict[int, Payload] = field(default_factory=dict)
    is_done: bool = False
    futures: list[Future[None]] = field(default_factory=list)

    def describe(self) -> str:
        missing = [rank for rank in self.ranks if rank not in self.parts]
        return f"{self.kind} of ranks {list(self.ranks)}, which ranks {missing} have not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpan:
    """A collective inside an action, as one rank saw it.

    Args:
        kind: which; names of `workbench.cost.collectives.Collective` where there are such.
        num_bytes: of the whole tensor.
        ranks: of its group.
        start_s: when this rank came to it, on the machine's monotonic clock.
        wait_s: [2] when this rank began to wait for it, and when it went on.
    """

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    start_s: float
    wait_s: tuple[float, float]


class Mailbox:
    """What all ranks of one process share: messages under way and collectives."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._sent: dict[tuple[int, int], Tensor] = {}
        self._rendezvous: dict[tuple[tuple[int, ...], str, int], Rendezvous] = {}
        self._num_met: dict[tuple[int, tuple[int, ...], str], int] = {}

    def put(self, row: int, rank: int, packed: Tensor) -> None:
        """A row for a rank: kept, as a copy, until it is taken."""
        if (row, rank) in self._sent:
            raise RankError(f"row {row} was sent to rank {rank} twice")
        self._sent[row, rank] = packed.clone()

    def is_there(self, row: int, rank: int) -> bool:
        return (row, rank) in self._sent

    def take(self, row: int, rank: int, buffer: Tensor) -> None:
        """Copy a row that is there into its receiver's buffer."""
        buffer.copy_(self._sent.pop((row, rank)))

    def join(
        self, channel: str, kind: str, ranks: tuple[int, ...], rank: int, part: Payload, combine: Combine
    ) -> Rendezvous:
        """Bring a part to the next collective of these ranks on a channel; the last one combines.

        Raises:
            RankError: another rank is at a collective of another kind.
        """
        number = self._num_met.get((rank, ranks, channel), 0)
        self._num_met[rank, ranks, channel] = number + 1
        key = (ranks, channel, number)
        rendezvous = self._rendezvous.setdefault(key, Rendezvous(kind, ranks, combine))
        if rendezvous.kind != kind:
            there = sorted(rendezvous.parts)
            raise RankError(f"rank {rank} reached {kind}, but ranks {there} are at {rendezvous.kind}")
        rendezvous.parts[rank] = part
        if len(rendezvous.parts) == len(ranks):
            with self.turns.aside(self.turns.runners[rank]):
                rendezvous.combine(rendezvous.parts)
                del self._rendezvous[key]
                rendezvous.is_done = True
                for future in rendezvous.futures:
                    future.set_result(None)
        return rendezvous


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A row's arrival, as a work and as an event."""

    mailbox: Mailbox
    runner: Runner
    row: Transfer
    buffer: Tensor

    @property
    def is_done(self) -> bool:
        return self.mailbox.is_there(self.row.row, self.runner.rank)

    def describe(self) -> str:
        return f"row {self.row.row} ({self.row.edge}, {self.row.producer} to {self.row.consumer})"

    def wait(self, timeout: object = None) -> bool:
        del timeout
        while not self.is_done:
            self.mailbox.turns.hand_back(self.runner, self)
        with self.mailbox.turns.aside(self.runner):
            self.mailbox.take(self.row.row, self.runner.rank, self.buffer)
        return True


class _Gone:
    """A send: over as soon as it is made."""

    def wait(self, timeout: object = None) -> bool:
        del timeout
        return True


@dataclass(frozen=True, slots=True)
class Arrival:
    """A collective as one rank's work."""

    mailbox: Mailbox
    runner: Runner
    rendezvous: Rendezvous

    def wait(self, timeout: object = None) -> bool:
        del timeout
        while not self.rendezvous.is_done:
            self.mailbox.turns.hand_back(self.runner, self.rendezvous)
        return True

    def get_future(self) -> Future[None]:
        future: Future[None] = Future()
        if self.rendezvous.is_done:
            future.set_result(None)
        else:
            self.rendezvous.futures.append(future)
        return future


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadMesh(Mesh):
    """One rank of a process that holds them all.

    Args:
        mailbox: shared by all ranks.
        runner: this rank's thread.
        exchanges: grows by every collective inside an action.
    """

    mailbox: Mailbox
    runner: Runner
    exchanges: list[CollectiveSpan] = field(default_factory=list)

    def send(self, row: Transfer, rank: int, packed: Tensor) -> dist.Work:
        with self.mailbox.turns.aside(self.runner):
            self.mailbox.put(row.row, rank, packed)
        return cast(dist.Work, _Gone())

    def receive(self, row: Transfer, buffer: Tensor) -> dist.Work:
        return cast(dist.Work, _Delivery(self.mailbox, self.runner, row, buffer))

    def start_all_reduce(self, bucket: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        rendezvous = self.mailbox.join(
            "gradients", CollectiveKind.GRADIENTS, ranks, self.rank, bucket, sum_in_place
        )
        return cast(dist.Work, Arrival(self.mailbox, self.runner, rendezvous))

    def start_reduce_scatter(self, part: Tensor, whole: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        rendezvous = self.mailbox.join(
            "gradients", CollectiveKind.PARTS, ranks, self.rank, (part, whole), partial(scatter, ranks)
        )
        return cast(dist.Work, Arrival(self.mailbox, self.runner, rendezvous))

    def start_all_gather(self, whole: Tensor, part: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        given = (whole, part.clone())
        rendezvous = self.mailbox.join(
            "weights", CollectiveKind.WEIGHTS, ranks, self.rank, given, partial(gather, ranks)
        )
        return cast(dist.Work, Arrival(self.mailbox, self.runner, rendezvous))

    def start_exchange(
        self, received: Tensor, sent: Tensor, counts: tuple[list[int], list[int]], ranks: tuple[int, ...]
    ) -> dist.Work:
        part = received, sent, counts[1]
        rendezvous = self.mailbox.join(
            "matrices", CollectiveKind.MATRICES, ranks, self.rank, part, partial(exchange, ranks)
        )
        return cast(dist.Work, Arrival(self.mailbox, self.runner, rendezvous))

    def sum_over_all(self, total: Tensor) -> None:
        rendezvous = self.mailbox.join(
            "world", CollectiveKind.NORM, self.ranks, self.rank, total, sum_in_place
        )
        Arrival(self.mailbox, self.runner, rendezvous).wait()

    @property
    def orders_rows(self) -> bool:
        return False

    def align(self, what: str) -> None:
        del what
        self.runner.place = -1
        rendezvous = self.mailbox.join(
            "world", CollectiveKind.ALIGN, self.ranks, self.rank, None, lambda parts: None
        )
        Arrival(self.mailbox, self.runner, rendezvous).wait()


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """In the order of the ranks."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def gather(ranks: tuple[int, ...], parts: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """(into, own) of every rank: everybody's own one after the other."""
    whole = torch.cat([parts[rank][1] for rank in ranks])
    for into, _ in parts.values():
        into.copy_(whole)


def scatter(ranks: tuple[int, ...], tensors: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """(own, parts) of every rank: the sum of everybody's part for it."""
    for member, rank in enumerate(ranks):
        tensors[rank][0].copy_(_sum([tensors[other][1].chunk(len(ranks))[member] for other in ranks]))


def exchange(ranks: tuple[int, ...], parts: Mapping[int, tuple[Tensor, Tensor, list[int]]]) -> None:
    """(into, own, counts) of every rank: everybody's piece for it, one after the other."""
    pieces = {rank: parts[rank][1].split(parts[rank][2]) for rank in ranks}
    for member, rank in enumerate(ranks):
        parts[rank][0].copy_(torch.cat([pieces[other][member] for other in ranks]))


def sum_in_place(parts: Mapping[int, Tensor]) -> None:
    """Everybody's becomes the sum, in the order of the ranks."""
    total = _sum([parts[rank] for rank in sorted(parts)])
    for part in parts.values():
        part.copy_(total)
