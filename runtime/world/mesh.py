"""One rank among those of its plan, and its communication with the others."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.world.clock import HOST, Awaited, Clock
from runtime.world.failure import RankError, first_line
from runtime.world.tensor_collectives import GATHER, SCATTER
from workbench.plan.lowered import Route, Transfer

PairKey = tuple[Route, int, int]  # source and destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This process's rank among the plan's, with its process groups.

    Process i runs the i-th rank of `ranks`; a plan may leave ranks of its cluster unused.

    Args:
        rank: of this process in the plan.
        ranks: all ranks that take part, ascending.
        device: of tensors.
        timeout_s: of every wait in a group.
        clock: takes times on the device, and waits for other ranks.
        reduction: ranks that reduce gradients or gather weights -> their process group, if this rank is in
            it: gradient groups, and the instances and peers of a sharded optimizer.
        units: ranks that shard weights -> the process group of their exchanges. Reductions interleave with
            these differently on each rank, so the two have separate groups.
        pair: (route, source, destination) -> process group of these rows; empty where rows are matched by
            tag.
        context: ranks that share the tokens of a stage, ascending -> the process group of their attention.
        tensor: ranks that share the weights of a stage, in grid order -> the process group of their sums.
        experts: ranks that distribute the experts of a stage, in grid order -> that of their exchanges.
        everyone: all ranks -> that of the clipping norm; empty where it is the world's.
    """

    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    timeout_s: float = 60.0
    clock: Clock = HOST
    reduction: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    units: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    pair: dict[PairKey, dist.ProcessGroup] = field(default_factory=dict)
    context: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    tensor: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    experts: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    everyone: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def process_of(self, rank: int) -> int:
        """Global process index of a rank of the plan."""
        return self.ranks.index(rank)

    @property
    def peers(self) -> tuple[int, ...]:
        """All other ranks."""
        return tuple(rank for rank in self.ranks if rank != self.rank)

    @property
    def orders_rows(self) -> bool:
        """Whether rows are matched by order, in a communicator per pair and direction, not by tag."""
        return self.device.type == "cuda"

    def pair_group(self, row: Transfer, destination_rank: int) -> dist.ProcessGroup | None:
        """The group that carries the row to that rank; None: the world."""
        return self.pair.get((row.route, row.source_rank, destination_rank))

    def send(self, row: Transfer, rank: int, packed: Tensor) -> dist.Work | None:
        """Start sending a row to one of its destinations; None outside the row's group."""
        return dist.isend(packed, self.process_of(rank), group=self.pair_group(row, rank), tag=row.row)

    def receive(self, row: Transfer, buffer: Tensor) -> dist.Work | None:
        """Start receiving a row; None outside the row's group."""
        group = self.pair_group(row, self.rank)
        return dist.irecv(buffer, self.process_of(row.source_rank), group=group, tag=row.row)

    def start_all_reduce(self, bucket: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """Start summing a bucket, in place, over the ranks of a gradient group."""
        return dist.all_reduce(bucket, group=self.reduction[ranks], async_op=True)

    def start_reduce_scatter(self, part: Tensor, whole: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """Start `part` <- this rank's part of the sum of `whole` over the ranks of an instance."""
        return SCATTER(part, whole, group=self.reduction[ranks], async_op=True)

    def start_all_gather(self, whole: Tensor, part: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """Start `whole` <- all `part`s, in the order of the ranks of an instance.

        The caller keeps `part`, in separate memory, until the work has been waited for.
        """
        return GATHER(whole, part, group=self.reduction[ranks], async_op=True)

    def start_exchange(
        self, received: Tensor, sent: Tensor, counts: tuple[list[int], list[int]], ranks: tuple[int, ...]
    ) -> dist.Work:
        """Start an all-to-all among the ranks of an instance, or that shard weights; see `ContextGroup`."""
        group = self.reduction[ranks] if ranks in self.reduction else self.units[ranks]
        return dist.all_to_all_single(received, sent, counts[0], counts[1], group=group, async_op=True)

    def sum_over_all(self, total: Tensor) -> None:
        """Sum in place over all ranks.

        Raises:
            RankError: the sum did not end in time, or a rank is gone.
        """
        work = dist.all_reduce(total, group=self.everyone.get(self.ranks), async_op=True)
        self.clock.wait(work, Awaited(f"rank {self.rank} in STEP, summing the norm", self.peers))

    def align(self, what: str) -> None:
        """A barrier of all ranks, by gloo on the host for any device.

        Raises:
            RankError: a rank is gone, or did not arrive in time.
        """
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} {what}: {first_line(error)}", peers=self.peers) from error
