"""Groups of ranks that are threads of one process: what stages say inside a pass stays in memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.emulation.thread_mesh import (
    Arrival,
    CollectiveKind,
    CollectiveSpan,
    Combine,
    Payload,
    ThreadMesh,
    exchange,
    gather,
    scatter,
    sum_in_place,
)
from runtime.parallel.context.group import ContextGroup, Pending
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.stage_groups import Group, ProcessGroups, StageGroups
from runtime.parallel.tensor.group import TensorGroup
from runtime.world.mesh import Mesh


class _Collectives:
    """What any of the groups can do. Every collective starts by waiting for nobody.

    `ranks` may stand in another order than the parts of a collective, which is theirs ascending.
    """

    __slots__ = ()
    ranks: tuple[int, ...]
    rank: int
    mesh: ThreadMesh

    def gather(self, gathered: Tensor, own: Tensor) -> Pending:
        return self._start(
            CollectiveKind.GATHER, (gathered, own), gathered.nbytes, partial(gather, self._order)
        )

    def scatter(self, own: Tensor, parts: Tensor) -> Pending:
        return self._start(CollectiveKind.SCATTER, (own, parts), parts.nbytes, partial(scatter, self._order))

    def exchange(self, received: Tensor, sent: Tensor, counts: tuple[list[int], list[int]]) -> Pending:
        part = received, sent, counts[1]
        return self._start(CollectiveKind.EXCHANGE, part, sent.nbytes, partial(exchange, self._order))

    @property
    def _order(self) -> tuple[int, ...]:
        return tuple(sorted(self.ranks))

    def _start(self, kind: str, part: Payload, num_bytes: int, combine: Combine) -> Pending:
        assert isinstance(self, ContextGroup), "mixed into groups"
        work = _Watched(self.mesh, type(self).__name__, (kind, num_bytes, self._order), part, combine)
        return Pending(self, cast(dist.Work, work), kind)


@dataclass(frozen=True, slots=True)
class ThreadContextGroup(_Collectives, ContextGroup):
    """A context-parallel group of threads."""

    mesh: ThreadMesh

    def pass_on(self, received: Tensor, sent: Tensor) -> tuple[Pending, Pending]:
        order = self._order

        def combine(parts: Mapping[int, tuple[Tensor, Tensor]]) -> None:
            for member, rank in enumerate(order):
                parts[rank][0].copy_(parts[order[member - 1]][1])

        pending = self._start(CollectiveKind.PASS_ON, (received, sent), sent.nbytes, combine)
        return pending, pending


@dataclass(frozen=True, slots=True)
class ThreadTensorGroup(_Collectives, TensorGroup):
    """A tensor-parallel group of threads."""

    mesh: ThreadMesh

    def collect(self, own: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        parts: list[Tensor] = []

        def combine(members: Mapping[int, tuple[list[Tensor], Tensor]]) -> None:
            for gathered, _ in members.values():
                gathered += [
                    members[rank][1].reshape(tuple(s)) for rank, s in zip(self.ranks, shapes, strict=True)
                ]

        self._start(CollectiveKind.GATHER, (parts, own), own.nbytes * self.size, combine).wait()
        return parts

    def _begin(self, x: Tensor, operation: dist.ReduceOp.RedOpType, what: str) -> Pending:
        del what
        combine = sum_in_place if operation == dist.ReduceOp.SUM else _largest_in_place
        return self._start(CollectiveKind.SUM, x, x.nbytes, combine)


@dataclass(frozen=True, slots=True)
class ThreadExpertGroup(_Collectives, ExpertGroup):
    """An expert-parallel group of threads."""

    mesh: ThreadMesh

    collect = ThreadTensorGroup.collect


THREADS: Mapping[type[ContextGroup], Callable[..., Any]] = {
    ContextGroup: ThreadContextGroup,
    TensorGroup: ThreadTensorGroup,
    ExpertGroup: ThreadExpertGroup,
}


class ThreadGroups(StageGroups):
    """Finds those of threads."""

    def join(self, kind: type[Group], mesh: Mesh, ranks: tuple[int, ...], held: ProcessGroups) -> Group:
        del held
        group: Group = THREADS[kind](ranks, mesh.rank, None, mesh)
        return group


def _largest_in_place(parts: Mapping[int, Tensor]) -> None:
    largest = torch.stack(list(parts.values())).amax(0)
    for part in parts.values():
        part.copy_(largest)


class _Watched:
    """A collective inside an action, that notes when its rank came and waited."""

    def __init__(
        self,
        mesh: ThreadMesh,
        channel: str,
        note: tuple[str, int, tuple[int, ...]],
        part: Payload,
        combine: Combine,
    ) -> None:
        self._mesh, self._note = mesh, note
        self._start_s = mesh.clock.stamp()
        kind, _, ranks = note
        collective = mesh.mailbox.join(channel, kind, ranks, mesh.rank, part, combine)
        self._arrival = Arrival(mesh.mailbox, mesh.runner, collective)
        self._is_noted = False

    def wait(self, timeout: object = None) -> bool:
        began_s = self._mesh.clock.stamp()
        self._arrival.wait(timeout)
        if not self._is_noted:
            kind, num_bytes, ranks = self._note
            self._is_noted = True
            self._mesh.exchanges.append(
                CollectiveSpan(
                    kind=kind,
                    num_bytes=num_bytes,
                    ranks=ranks,
                    start_s=self._start_s,
                    wait_s=(began_s, self._mesh.clock.stamp()),
                )
            )
        return True
