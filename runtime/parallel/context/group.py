"""The ranks that share the tokens of a stage, and collectives among them whose errors name peers."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from runtime.world.clock import HOST, Awaited, Clock
from runtime.world.tensor_collectives import GATHER, SCATTER


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """A context-parallel group, on one of its ranks.

    Args:
        ranks: of the plan, ascending: the order of a process group.
        rank: this one.
        process_group: their communicator, used only by attention; None where they communicate otherwise.
        clock: of this rank.
    """

    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    clock: Clock = field(default=HOST, kw_only=True)
    gathering: ClassVar[str] = "gathering keys and values"
    summing: ClassVar[str] = "summing gradients of keys and values"
    exchanging: ClassVar[str] = "exchanging heads for tokens"

    @property
    def member(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, gathered: Tensor, own: Tensor) -> "Pending":
        """Start an all-gather: `gathered` [members x n, ...] <- members' `own` [n, ...], in order."""
        work = GATHER(gathered, own, group=self.process_group, async_op=True)
        return Pending(self, work, self.gathering)

    def scatter(self, own: Tensor, parts: Tensor) -> "Pending":
        """Start a reduce-scatter: `own` [n, ...] <- its part of the sum of `parts` [members x n, ...]."""
        work = SCATTER(own, parts, group=self.process_group, async_op=True)
        return Pending(self, work, self.summing)

    def exchange(self, received: Tensor, sent: Tensor, counts: tuple[list[int], list[int]]) -> "Pending":
        """Start an all-to-all along the first dim; `counts` are (received, sent)."""
        work = dist.all_to_all_single(
            received, sent, counts[0], counts[1], group=self.process_group, async_op=True
        )
        return Pending(self, work, self.exchanging)

    def pass_on(self, received: Tensor, sent: Tensor) -> "tuple[Pending, Pending]":
        """Start sending to the next member and receiving from the previous one."""
        following, before = (self.member + 1) % self.size, (self.member - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, sent, group=self.process_group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=self.process_group, group_peer=before),
        ]
        works = dist.batch_isend_irecv(operations)
        first, last = works[0], works[-1]
        return Pending(self, first, "passing blocks on"), Pending(self, last, "passing blocks on")


@dataclass(frozen=True, slots=True)
class Pending:
    """A started collective. On a GPU, waiting blocks the current stream, not the host."""

    group: ContextGroup
    work: dist.Work | None
    what: str

    def wait(self) -> None:
        """Wait for it; RankError where it does not end in time or a peer is gone."""
        if self.work is None:
            return
        self.group.clock.wait(self.work, Awaited.among(self.group.rank, self.what, self.group.ranks))
