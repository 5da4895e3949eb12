"""The ranks of a plan as torch process groups, created eagerly and in plan order."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.parameter_shards import shard_units

# torch 2.13 renamed these two.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PairKey = tuple[Route, int, int]  # source and destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This process's place among the plan's ranks.

    Process i runs the i-th rank of `ranks`; a plan may leave ranks of its cluster unused.

    Args:
        rank: the plan's name for this process.
        ranks: all ranks that take part, ascending.
        device: where tensors live.
        timeout_s: of every wait in a group.
        reduction: ranks that sum gradients or collect weights -> their process group, where this rank is
            in it: gradient groups, and the instances and peers of a sharded optimizer.
        units: ranks that share out weights -> the process group of their rounds. Sums come at any place
            among these, another one on each rank, so the two have groups of their own.
        pair: (route, source, destination) -> process group of these rows; empty on gloo, where
            rows match by tag and need no order.
        context: ranks that share the tokens of a stage, ascending -> the process group of their attention.
        tensor: ranks that share the weights of a stage, in grid order -> the process group of their sums.
        experts: ranks that deal out the experts of a stage, in grid order -> that of their exchanges.
    """

    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    timeout_s: float = 60.0
    reduction: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    units: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    pair: dict[PairKey, dist.ProcessGroup] = field(default_factory=dict)
    context: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    tensor: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    experts: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def process_of(self, rank: int) -> int:
        """Global process index of a rank of the plan."""
        return self.ranks.index(rank)

    @property
    def peers(self) -> tuple[int, ...]:
        """All other ranks."""
        return tuple(rank for rank in self.ranks if rank != self.rank)

    def pair_group(self, row: Transfer, destination_rank: int) -> dist.ProcessGroup | None:
        """The group that carries the row to that rank; None is the world."""
        return self.pair.get((row.route, row.source_rank, destination_rank))

    def send(self, row: Transfer, rank: int, packed: Tensor) -> dist.Work | None:
        """Start sending a row to one of its destinations; None outside the row's group."""
        return dist.isend(packed, self.process_of(rank), group=self.pair_group(row, rank), tag=row.row)

    def receive(self, row: Transfer, buffer: Tensor) -> dist.Work | None:
        """Start receiving a row; None outside the row's group."""
        group = self.pair_group(row, self.rank)
        return dist.irecv(buffer, self.process_of(row.source_rank), group=group, tag=row.row)

    def start_sum(self, bucket: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """Start summing a bucket, in place, over the ranks of a gradient group."""
        return dist.all_reduce(bucket, group=self.reduction[ranks], async_op=True)

    def start_scatter(self, part: Tensor, whole: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """Start `part` <- this rank's part of everybody's `whole`, summed over the ranks of an instance."""
        return SCATTER(part, whole, group=self.reduction[ranks], async_op=True)

    def start_gather(self, whole: Tensor, part: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """Start `whole` <- everybody's `part`, in the order of the ranks of an instance."""
        return GATHER(whole, part.clone(), group=self.reduction[ranks], async_op=True)

    def start_dealing(self, part: Tensor, whole: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """As `start_scatter`, over the ranks of a unit of shared-out weights."""
        return SCATTER(part, whole, group=self.units[ranks], async_op=True)

    def start_collecting(self, whole: Tensor, part: Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """As `start_gather`, over the ranks of a unit of shared-out weights."""
        return GATHER(whole, part.clone(), group=self.units[ranks], async_op=True)

    def sum_over_all(self, total: Tensor) -> None:
        """Sum in place over all ranks; RuntimeError when one is gone."""
        dist.all_reduce(total)

    def align(self) -> None:
        """Wait until all ranks are here; RuntimeError when one is gone."""
        dist.barrier()


def local_device() -> torch.device:
    """This process's GPU where there is one (by torchrun's LOCAL_RANK), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_mesh(lowered: Lowered, device: torch.device, timeout_s: float) -> Mesh:
    """Create every process group that the plan needs. Collective: all ranks call it once.

    NCCL orders operations per communicator and ignores tags, so each direction of each pair
    gets a communicator of its own: a send never stands before a receive that it waits for.
    Broadcasts have theirs apart from other rows, because their sender posts them in the order
    in which it needs them itself. So do the attention of a context-parallel stage, the sums of a
    tensor-parallel one and the exchanges of an expert-parallel one.
    Differs: opposite rows of a pair therefore need no batching into one group.

    Args:
        timeout_s: of every wait in one of the groups.

    Raises:
        ValueError: the number of processes is not the plan's number of ranks.
    """
    ranks = lowered.plan.ranks
    if dist.get_world_size() != len(ranks):
        raise ValueError(f"the plan runs on {len(ranks)} ranks, got {dist.get_world_size()} processes")
    mesh = Mesh(rank=ranks[dist.get_rank()], ranks=ranks, device=device, timeout_s=timeout_s)
    _open_groups(mesh, _reducing(lowered), mesh.reduction)
    _open_groups(mesh, (unit.ranks for unit in shard_units(lowered.plan)), mesh.units)
    stages = lowered.plan.stages
    columns = (column for stage in stages if stage.cp > 1 for column in zip(*stage.ranks, strict=True))
    _open_groups(mesh, (tuple(sorted(column)) for column in columns), mesh.context)
    _open_groups(mesh, (row for stage in stages if stage.tp > 1 for row in stage.ranks), mesh.tensor)
    dealt = (ranks for stage in stages if stage.ep > 1 for ranks in stage.expert_ranks)
    _open_groups(mesh, dealt, mesh.experts)
    open_pairs(mesh, lowered, set())
    return mesh


def _reducing(lowered: Lowered) -> Iterator[tuple[int, ...]]:
    """Ranks that sum gradients or collect updated weights, in plan order."""
    for group in lowered.groups:
        shards = optimizer_shards(lowered.plan, group)
        peers = tuple(zip(*shards.instances, strict=True))
        yield from (ranks for ranks in (group.ranks, *shards.instances, *peers) if len(ranks) > 1)


def _open_groups(
    mesh: Mesh, wanted: Iterable[tuple[int, ...]], held: dict[tuple[int, ...], dist.ProcessGroup]
) -> None:
    """Create a group for each distinct set of ranks; those that this rank is in are held."""
    for members in dict.fromkeys(wanted):
        group = _new_group(mesh, members)
        if mesh.rank in members:
            held[members] = group
            _warm_up(group, mesh.device)


def _new_group(mesh: Mesh, members: Iterable[int]) -> dist.ProcessGroup:
    """Its waits end like those of the world: a group made without a timeout has torch's, many minutes."""
    processes = [mesh.process_of(member) for member in members]
    return dist.new_group(processes, timeout=timedelta(seconds=mesh.timeout_s))


def open_pairs(mesh: Mesh, lowered: Lowered, opened: set[PairKey]) -> None:
    """Create communicators of the pairs that are not in `opened`, and add them. Collective."""
    new = [pair for pair in pairs_of(lowered) if pair not in opened]
    opened.update(new)
    if mesh.device.type != "cuda":
        return
    for pair in new:
        _, source, destination = pair
        group = _new_group(mesh, (source, destination))
        if mesh.rank in (source, destination):
            mesh.pair[pair] = group
            _warm_up(group, mesh.device)


def pairs_of(lowered: Lowered) -> list[PairKey]:
    """(route, source, destination) of all rows that travel, ascending."""
    rows = [row for row in lowered.transfers if row.route is not Route.LOCAL]
    return sorted({(row.route, row.source_rank, rank) for row in rows for rank in row.destination_ranks})


def _warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """One tiny all-reduce: communicators that are made on first use are made here."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
