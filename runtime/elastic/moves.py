"""Transfers of layers between processes, weights and moments, and their storage in files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.elastic.job import ElasticJob, Member, held_by, members_of
from runtime.state.tensor_files import keys_in, read_tensors, write_tensors
from runtime.step.fsdp.weights import split_flat
from runtime.world.clock import Awaited, Clock
from workbench.elastic.copies import Copy
from workbench.elastic.layout import NodeLayout

# Shape suffixes: N = all numbers of a layer's state.

Owner = tuple[str, int]  # module, layer of it
CPU = torch.device("cpu")
PLACES = ("weight", "first_moment", "second_moment")  # names in files


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A weight and its moments of AdamW; None where it is not trained."""

    weight: Tensor
    moments: tuple[Tensor, Tensor] | None

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight, *(self.moments or ()))


LayerState = dict[str, Kept]  # by Hugging Face name
Holdings = dict[Owner, LayerState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Transfer of a part of a layer's state between two ranks of a world; `number` is the message's tag.

    The part is the fraction from first / whole to end / whole of the concatenated state.
    """

    number: int
    owner: Owner
    source_rank: int
    destination_rank: int
    first: int = 0
    end: int = 1
    whole: int = 1

    def span(self, num_elements: int) -> slice:
        """The part of a state of `num_elements`; neighbouring parts are contiguous for any number."""
        return slice(self.first * num_elements // self.whole, self.end * num_elements // self.whole)


def moves_between(
    job: ElasticJob, before: NodeLayout, after: NodeLayout, copies: Sequence[Copy], world: NodeLayout
) -> tuple[Move, ...]:
    """Moves between ranks, from copies between nodes; within a node a layer comes from its own processes.

    Where several ranks of a node had a layer, each sends it in turn: the i-th of a stage to the i-th, whose
    part of sharded weights is the same.

    Args:
        before, after: layouts before and after the change.
        copies: from `copies_between`.
        world: layout of the ranks that execute the moves.
    """
    had, needs = held_by(job, before), held_by(job, after)
    rank_of = {member: rank for rank, member in enumerate(members_of(world, job.ranks_per_node))}
    stripes: dict[tuple[int, str], list[Copy]] = {}
    for copy in copies:
        stripes.setdefault((copy.layer, copy.destination), []).append(copy)
    at: dict[tuple[str, int], list[Member]] = {}
    for member, layers in had.items():
        for layer in layers:
            at.setdefault((member.node, layer), []).append(member)
    missing = [
        (member, layer)
        for member, layers in needs.items()
        for layer in layers
        if layer not in had.get(member, ())
    ]
    moves: list[Move] = []
    for member, layer in missing:
        near = at.get((member.node, layer))
        parts = [(near, 0, 1, 1)] if near else _parts(stripes[layer, member.node], at)
        moves += (
            Move(
                number=number,
                owner=job.chain.owners[layer],
                source_rank=rank_of[givers[member.slot % len(givers)]],
                destination_rank=rank_of[member],
                first=first,
                end=end,
                whole=whole,
            )
            for number, (givers, first, end, whole) in enumerate(parts, start=len(moves))
        )
    return tuple(moves)


def _parts(
    stripes: Sequence[Copy], at: Mapping[tuple[str, int], list[Member]]
) -> list[tuple[list[Member], int, int, int]]:
    """(possible senders, first, end, whole) of each part of a layer."""
    whole = max(1, sum(copy.num_bytes for copy in stripes))
    ends = [copy.first_byte + copy.num_bytes for copy in stripes]
    ends[-1] = whole
    return [
        (at[copy.source, copy.layer], copy.first_byte, end, whole)
        for copy, end in zip(stripes, ends, strict=True)
    ]


def carry_out(
    moves: Sequence[Move],
    rank: int,
    held: Mapping[Owner, LayerState],
    empty: Mapping[Owner, LayerState],
    *,
    clock: Clock,
) -> tuple[Holdings, int]:
    """Execute this rank's part of all moves; the layers that arrived, and the bytes received.

    Args:
        held: layers that this rank can send.
        empty: tensors to fill, of every layer that it receives.
        clock: of this rank.

    Raises:
        RankError: a transfer did not end in time, or the peer is gone.
        ValueError: a layer to send that this rank does not have.
    """
    works: list[tuple[Move, dist.Work]] = []
    giving: dict[Owner, Tensor] = {}
    arriving: dict[Owner, Tensor] = {}
    for move in moves:
        if move.source_rank == rank:
            if move.owner not in held:
                raise ValueError(f"rank {rank} does not have layer {move.owner}, which it must send")
            if move.owner not in giving:
                giving[move.owner] = torch.cat(
                    [tensor.detach().reshape(-1) for tensor in _tensors(held[move.owner])]
                )
            flat_N = giving[move.owner]
            part = flat_N[move.span(len(flat_N))]
            works.append((move, _started(dist.isend(part, move.destination_rank, tag=move.number))))
        elif move.destination_rank == rank:
            if move.owner not in arriving:
                whole = list(_tensors(empty[move.owner]))
                numel = sum(tensor.numel() for tensor in whole)
                arriving[move.owner] = torch.empty(numel, dtype=whole[0].dtype)
            flat_N = arriving[move.owner]
            part = flat_N[move.span(len(flat_N))]
            works.append((move, _started(dist.irecv(part, move.source_rank, tag=move.number))))
    for move, work in works:
        peer = move.source_rank if move.destination_rank == rank else move.destination_rank
        clock.wait(work, Awaited(f"rank {rank} copying layer {move.owner} with rank {peer}", (peer,)))
    for owner, flat_N in arriving.items():
        _fill(empty[owner], flat_N)
    arrived = {owner: empty[owner] for owner in arriving}
    return arrived, sum(flat_N.numel() * flat_N.element_size() for flat_N in arriving.values())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "the world has every rank"
    return work


def _tensors(state: LayerState) -> Iterator[Tensor]:
    for kept in state.values():
        yield from kept.tensors()


def _fill(state: LayerState, flat_N: Tensor) -> None:
    tensors = list(_tensors(state))
    for tensor, part_N in zip(tensors, split_flat(flat_N, tensors), strict=True):
        tensor.copy_(part_N.view_as(tensor))


def write_state(folder: Path, held: Holdings) -> None:
    """Write these layers to a folder."""
    write_tensors(folder, dict(_keyed(held)))


def read_state(folder: Path, empty: Holdings) -> None:
    """Fill tensors from the subfolders of `folder`, each layer from the one that contains it.

    Raises:
        ValueError: a layer that none of them contains.
    """
    missing = dict(_keyed(empty))
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        if keys := sorted(keys_in(part) & missing.keys()):
            read_tensors(part, {key: missing.pop(key) for key in keys})
    if missing:
        raise ValueError(f"{folder}: {min(missing)} is in none of its parts")


def _keyed(held: Holdings) -> Iterator[tuple[str, Tensor]]:
    for (module, layer), state in held.items():
        for name, kept in state.items():
            for index, tensor in zip(PLACES, kept.tensors(), strict=False):
                yield f"{module}/{layer}/{name}/{index}", tensor
