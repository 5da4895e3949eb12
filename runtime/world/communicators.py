"""Creates the process groups of a plan, in the same order on all ranks, and uses each once before a step."""

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.world.clock import Awaited, Clock
from runtime.world.mesh import Mesh, PairKey
from runtime.world.streams import CudaStreams, StreamClock, Watch
from workbench.plan.kernel_heads import check_kernel_heads
from workbench.plan.lowered import Lowered, Route
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.parameter_shards import shard_units
from workbench.plan.runnable import check_boundaries

QUEUED = 20.0  # in timeouts: limit of a step queued on a GPU

Groups = dict[tuple[int, ...], dist.ProcessGroup]


def clock_of(device: torch.device, timeout_s: float) -> Clock:
    """The clock of a rank on a device, in its own process."""
    if device.type == "cpu":
        return Clock(timeout_s)
    return StreamClock(CudaStreams(device), Watch(timeout_s, _abort_all))


def _abort_all() -> None:
    """Abort every NCCL communicator of this process, in one group so that they do not wait for each other."""
    device = torch.device("cuda")
    groups = dist.distributed_c10d._world.pg_names
    backends: list[Any] = [b for b in (group._get_backend(device) for group in groups) if b.name() == "nccl"]
    backends[0]._group_start()
    for backend in reversed(backends):
        backend.abort()
    backends[0]._group_end()


def build_mesh(
    lowered: Lowered, device: torch.device, timeout_s: float, make: Callable[..., Mesh] = Mesh
) -> Mesh:
    """Create every process group that the plan needs. Collective: all ranks call it once.

    NCCL orders operations per communicator and ignores tags, so each direction of each pair gets a
    communicator of its own: a send never blocks a receive on which it depends. Broadcasts have separate ones
    from other rows, because they are sent when the row that they follow is received or produced, not in the
    order of row numbers. So have the attention of a context-parallel stage, the sums of a tensor-parallel
    one, the exchanges of an expert-parallel one and the clipping norm, which is not the world's: the world's
    timeout is that of host waits. All are created, and then first used, in the same order on all ranks.
    Differs: opposite rows of a pair are not batched. A batch starts when both ends have computed their rows,
    so the earlier row would no longer overlap the later one's action.

    Args:
        timeout_s: of every wait in one of the groups.
        make: the mesh from its fields.

    Raises:
        ValueError: the number of processes is not the plan's number of ranks; on GPUs, brokers, or heads
            that no kernel takes.
        RankError: a rank did not take part in the first use of a group.
    """
    ranks = lowered.plan.ranks
    if dist.get_world_size() != len(ranks):
        raise ValueError(f"the plan runs on {len(ranks)} ranks, got {dist.get_world_size()} processes")
    check_boundaries(lowered.plan, device.type)
    check_kernel_heads(lowered.plan, device.type)
    mesh = make(
        rank=ranks[dist.get_rank()],
        ranks=ranks,
        device=device,
        timeout_s=timeout_s,
        clock=clock_of(device, timeout_s),
    )
    _open_groups(mesh, _reducing(lowered), mesh.reduction)
    units = shard_units(lowered.plan)
    sharers = (ranks for unit in units for ranks in (*unit.holders, *unit.expert_holders) if len(ranks) > 1)
    _open_groups(mesh, sharers, mesh.units)
    stages = lowered.plan.stages
    columns = (column for stage in stages if stage.cp > 1 for column in stage.context_ranks)
    _open_groups(mesh, (tuple(sorted(column)) for column in columns), mesh.context)
    _open_groups(mesh, (row for stage in stages if stage.tp > 1 for row in stage.ranks), mesh.tensor)
    expert_groups = (ranks for stage in stages if stage.ep > 1 for ranks in stage.expert_ranks)
    _open_groups(mesh, expert_groups, mesh.experts)
    if mesh.orders_rows:
        _open_groups(mesh, (ranks,), mesh.everyone)
    for groups in (mesh.reduction, mesh.units, mesh.context, mesh.tensor, mesh.experts, mesh.everyone):
        _use_first(mesh, groups)
    open_pairs(mesh, lowered, set())
    return mesh


def _reducing(lowered: Lowered) -> Iterator[tuple[int, ...]]:
    """Yield sets of ranks that reduce gradients or gather updated weights, in plan order."""
    for group in lowered.groups:
        shards = optimizer_shards(lowered.plan, group)
        peers = tuple(zip(*shards.instances, strict=True))
        yield from (ranks for ranks in (group.ranks, *shards.instances, *peers) if len(ranks) > 1)


def _open_groups(mesh: Mesh, rank_sets: Iterable[tuple[int, ...]], groups: Groups) -> None:
    """Create a group for each distinct set of ranks, and add those of this rank to `groups`."""
    for members in dict.fromkeys(rank_sets):
        group = _new_group(mesh, members)
        if mesh.rank in members:
            groups[members] = group


def _new_group(mesh: Mesh, members: Iterable[int]) -> dist.ProcessGroup:
    """Create a group with the timeout of the mesh; torch's default is many minutes.

    NCCL's own timeout counts from when a work is queued, and ends the process without naming a peer; so it is
    the last resort after the clock's.
    """
    processes = [mesh.process_of(member) for member in members]
    if mesh.device.type == "cpu":
        return dist.new_group(processes, timeout=timedelta(seconds=mesh.timeout_s))
    return dist.new_group(processes, timeout=timedelta(seconds=QUEUED * mesh.timeout_s), backend="nccl")


def open_pairs(mesh: Mesh, lowered: Lowered, opened: set[PairKey]) -> None:
    """Create communicators of the pairs that are not in `opened`, add them and use each once. Collective."""
    new = [pair for pair in pairs_of(lowered) if pair not in opened]
    opened.update(new)
    if not mesh.orders_rows:
        return
    for pair in new:
        group = _new_group(mesh, pair[1:])
        if mesh.rank in pair[1:]:
            mesh.pair[pair] = group
    for pair in new:
        if mesh.rank in pair[1:]:
            _send_first(mesh, pair)


def pairs_of(lowered: Lowered) -> list[PairKey]:
    """(route, source, destination) of all rows between ranks, ascending."""
    rows = [row for row in lowered.transfers if row.route is not Route.LOCAL]
    return sorted({(row.route, row.source_rank, rank) for row in rows for rank in row.destination_ranks})


def _use_first(mesh: Mesh, groups: Groups) -> None:
    """Run a tiny all-reduce in each group, as communicators are created on first use."""
    for ranks, group in groups.items():
        work = dist.all_reduce(torch.zeros(1, device=mesh.device), group=group, async_op=True)
        peers = tuple(rank for rank in ranks if rank != mesh.rank)
        _finish(mesh, work, Awaited(f"rank {mesh.rank} opening the group of ranks {list(ranks)}", peers))


def _send_first(mesh: Mesh, pair: PairKey) -> None:
    """Send one number in the pair's direction.

    Otherwise NCCL would connect the two at the first row, and the receiver's host would wait there for a
    sender that may depend on rows which the receiver has not sent yet.
    """
    route, source, destination = pair
    number, group = torch.zeros(1, device=mesh.device), mesh.pair[pair]
    if mesh.rank == source:
        peer, work = destination, dist.isend(number, mesh.process_of(destination), group=group)
    else:
        peer, work = source, dist.irecv(number, mesh.process_of(source), group=group)
    assert work is not None, "this rank is one of the pair"
    what = f"rank {mesh.rank} opening the way from rank {source} to rank {destination} ({route.value})"
    _finish(mesh, work, Awaited(what, (peer,)))


def _finish(mesh: Mesh, work: dist.Work, awaited: Awaited) -> None:
    mesh.clock.start_step()
    mesh.clock.wait(work, awaited)
    mesh.clock.settle()
