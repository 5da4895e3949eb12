"""Blocks of tokens placed to move few keys and values: the idea of DCP, as a baseline of the planner.

DCP (Jiang et al. 2025, SOSP, "DCP: Addressing Input Dynamism in Long-Context Training via Dynamic
Context Parallelism") partitions a hypergraph of data and computation blocks with KaHyPar, minimising
what moves between ranks under a balance constraint. Here a vertex is a block of tokens, weighted by the
tiles of its query row; a net is a block of keys and values with all rows that read it, weighted by its
bytes; what moves is the connectivity metric, sum of bytes x (ranks on the net - 1), counted exactly.

Differs: a row is computed where its queries live, so queries and partial outputs never move; DCP places
single tiles. Queries, keys and values of the same tokens share a rank. One level of greedy placement and
single-block moves that save bytes, from several starts, replace KaHyPar's multilevel search with its
hill climbing, so volumes are upper bounds of what DCP would find. Only placement is planned: DCP's
division into steps that overlap with communication is not.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.balance.tokens.compiled import descending_order
from workbench.balance.tokens.policies import Owners, checked_owners, longest_first, rank_loads, whole_units
from workbench.compiled import compiled


class Start(Enum):
    """Initial placement of a search."""

    LONGEST_FIRST = "longest first"
    RUNS_OF_EQUAL_WORK = "runs of equal work"
    AFFINITY = "heaviest first, to the rank that holds most of what a row reads"


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Owners of blocks, and their cost.

    Args:
        owners: int32 [B] rank of each block's queries, keys and values, read-only.
        moved_bytes: keys and values that ranks receive in one forward pass. The backward pass
            receives them again where they were dropped, and returns their gradients.
        max_over_mean: work of the heaviest rank over the mean.
        start: the start that led to it.
    """

    owners: Owners
    moved_bytes: int
    max_over_mean: float
    start: Start


@dataclass(frozen=True, slots=True, eq=False)
class BlockReads:
    """Which blocks of keys every block of queries reads: the non-empty tiles of a mask, by row.

    Args:
        row_offsets: int64 [B + 1], row b reads columns[row_offsets[b] : row_offsets[b + 1]].
        columns: int32 [tiles], ascending in each row, 0..B-1.
        block_bytes: int64 [B] bytes of each block's keys and values; one number for all is enough.

    Raises:
        ValueError: offsets or columns that are no such lists, negative bytes.
    """

    row_offsets: NDArray[np.int64]
    columns: NDArray[np.int32]
    block_bytes: NDArray[np.int64]

    def __post_init__(self) -> None:
        offsets, columns = np.array(self.row_offsets, np.int64), np.array(self.columns, np.int32)
        if offsets.ndim != 1 or offsets.size < 2 or offsets[0] != 0 or np.diff(offsets).min() < 0:
            raise ValueError("row_offsets must rise from 0 over at least one row")
        num_blocks = offsets.size - 1
        if columns.shape != (offsets[-1],):
            raise ValueError(f"row_offsets end at {offsets[-1]}, got {columns.shape} columns")
        if columns.size and not 0 <= columns.min() <= columns.max() < num_blocks:
            raise ValueError(
                f"columns must be in 0..{num_blocks - 1}, as many blocks of keys as of queries, "
                f"got {columns.min()}..{columns.max()}"
            )
        row = np.repeat(np.arange(num_blocks), np.diff(offsets))
        if columns.size and np.diff(row * num_blocks + columns).min(initial=1) < 1:
            raise ValueError("columns must rise within each row")
        sizes = np.broadcast_to(np.asarray(self.block_bytes, np.int64), num_blocks).copy()
        if sizes.min() < 0:
            raise ValueError(f"block_bytes must be >= 0, got {sizes.min()}")
        for name, array in (("row_offsets", offsets), ("columns", columns), ("block_bytes", sizes)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def num_blocks(self) -> int:
        return self.row_offsets.size - 1

    @property
    def row_work(self) -> NDArray[np.int64]:
        """Number of tiles of every row."""
        return np.diff(self.row_offsets)


def moved_bytes(reads: BlockReads, owners: ArrayLike, num_ranks: int) -> int:
    """Return the bytes of keys and values that ranks receive: each block once per other rank that reads it.

    Raises:
        ValueError: errors of `tokens.checked_owners`.

    Complexity: O(tiles + B G).
    """
    owned = checked_owners(owners, reads.num_blocks, num_ranks)
    pins = _pins(_nets(reads), owned, num_ranks)
    return int(((pins > 0).sum(axis=1) - 1) @ reads.block_bytes)


def gathered_bytes(reads: BlockReads, num_ranks: int) -> int:
    """Return the bytes that ranks receive if all keys and values are gathered everywhere."""
    return int(reads.block_bytes.sum()) * (num_ranks - 1)


def place_blocks(
    reads: BlockReads,
    num_ranks: int,
    *,
    work: ArrayLike | None = None,
    imbalance: float = 0.05,
    most_passes: int = 20,
) -> Placement:
    """Return owners that move few bytes while no rank is much heavier than the mean.

    From every `Start`, passes over all blocks move each to the rank that saves most bytes (ties to the
    lighter, then the lower rank) among those that stay within the limit; a block on a rank above the
    limit moves to the rank where it costs least. The start that ends with the fewest bytes wins, ties
    to the first.

    Args:
        reads: tiles of the mask and the bytes of the blocks.
        num_ranks: G.
        work: [B] work of each row; by default its tiles.
        imbalance: ranks hold at most (1 + imbalance) times the mean work, or what the heaviest rank
            of `tokens.longest_first` holds, where that is more.
        most_passes: limit on the passes from one start.

    Raises:
        ValueError: a negative imbalance, no pass; errors of `tokens.longest_first`.

    Complexity: O(G tiles) per pass, O(B G) space.
    """
    if not imbalance >= 0:
        raise ValueError(f"imbalance must be >= 0, got {imbalance}")
    if most_passes < 1:
        raise ValueError(f"most_passes must be >= 1, got {most_passes}")
    units = whole_units(reads.row_work if work is None else work, num_ranks)
    if units.size != reads.num_blocks:
        raise ValueError(f"want work for each of {reads.num_blocks} blocks, got {units.size}")
    lightest_start = longest_first(units, num_ranks)
    even = int(units.sum() * (1 + imbalance) / num_ranks)
    limit = max(even, int(rank_loads(units, lightest_start, num_ranks).max()))
    starts = {
        Start.LONGEST_FIRST: lightest_start,
        Start.RUNS_OF_EQUAL_WORK: _runs_of_equal_work(units, num_ranks),
        Start.AFFINITY: _by_affinity(_nets(reads), units, descending_order(units), num_ranks, limit),
    }
    results = [_improved(reads, units, owners, num_ranks, limit, most_passes) for owners in starts.values()]
    within = [
        Placement(owners, moved_bytes(reads, owners, num_ranks), _heaviest_over_mean(loads), start)
        for start, (owners, loads) in zip(starts, results, strict=True)
        if loads.max() <= limit
    ]
    return min(within, key=lambda placement: placement.moved_bytes)


def _improved(
    reads: BlockReads,
    units: NDArray[np.int64],
    owners: Owners,
    num_ranks: int,
    limit: int,
    most_passes: int,
) -> tuple[Owners, NDArray[np.int64]]:
    """Return owners after the passes, and the work of each rank."""
    searched = owners.copy()
    loads = np.zeros(num_ranks, np.int64)
    np.add.at(loads, searched, units)
    pins = _pins(_nets(reads), searched, num_ranks)
    for _ in range(most_passes):
        moves = _pass(_nets(reads), units, searched, loads, pins, limit)
        if not moves:
            break
    searched.setflags(write=False)
    return searched, loads


class _Nets(NamedTuple):
    """`BlockReads` as compiled code takes it."""

    row_offsets: NDArray[np.int64]
    columns: NDArray[np.int32]
    block_bytes: NDArray[np.int64]


def _nets(reads: BlockReads) -> _Nets:
    return _Nets(reads.row_offsets, reads.columns, reads.block_bytes)


def _heaviest_over_mean(loads: NDArray[np.int64]) -> float:
    total = int(loads.sum())
    return int(loads.max()) * loads.size / total if total else 1.0


def _runs_of_equal_work(units: NDArray[np.int64], num_ranks: int) -> Owners:
    """Assign consecutive blocks to each rank: cut where the middle of a block passes a rank's share."""
    middle = np.cumsum(units) - units / 2
    share = max(float(units.sum()) / num_ranks, 1.0)
    return np.minimum(middle // share, num_ranks - 1).astype(np.int32)


@compiled
def _pins(nets: _Nets, owners: NDArray[np.int32], num_ranks: int) -> NDArray[np.int32]:
    """[B, G] how many blocks of each rank hold or read each block."""
    pins = np.zeros((owners.size, num_ranks), np.int32)
    for block in range(owners.size):
        _pin(nets, pins, block, owners[block], 1)
    return pins


@compiled
def _pin(
    nets: _Nets,
    pins: NDArray[np.int32],
    block: int,
    rank: int,
    change: int,
) -> None:
    """Add a block's pins to a rank, or remove them; a block that reads its own keys is one pin."""
    pins[block, rank] += change
    for index in range(nets.row_offsets[block], nets.row_offsets[block + 1]):
        if nets.columns[index] != block:
            pins[nets.columns[index], rank] += change


@compiled
def _fresh_bytes(
    nets: _Nets,
    pins: NDArray[np.int32],
    block: int,
) -> NDArray[np.int64]:
    """[G] additional bytes that each rank would hold or receive if it got a block that no rank has."""
    fresh: NDArray[np.int64] = (pins[block] == 0) * nets.block_bytes[block]
    for index in range(nets.row_offsets[block], nets.row_offsets[block + 1]):
        net = nets.columns[index]
        if net != block:
            for rank in range(pins.shape[1]):
                fresh[rank] += (pins[net, rank] == 0) * nets.block_bytes[net]
    return fresh


@compiled
def _by_affinity(
    nets: _Nets,
    work: NDArray[np.int64],
    order: NDArray[np.int32],
    num_ranks: int,
    limit: int,
) -> NDArray[np.int32]:
    """Assign heaviest first, to the rank within the limit with the fewest new bytes, else the lightest."""
    owners = np.empty(work.size, np.int32)
    loads = np.zeros(num_ranks, np.int64)
    pins = np.zeros((work.size, num_ranks), np.int32)
    for block in order:
        fresh = _fresh_bytes(nets, pins, block)
        best = int(np.argmin(loads))
        if loads[best] + work[block] <= limit:
            for rank in range(num_ranks):
                as_good = fresh[rank] == fresh[best] and loads[rank] < loads[best]
                if loads[rank] + work[block] <= limit and (fresh[rank] < fresh[best] or as_good):
                    best = rank
        owners[block] = best
        loads[best] += work[block]
        _pin(nets, pins, block, best, 1)
    return owners


@compiled
def _pass(
    nets: _Nets,
    work: NDArray[np.int64],
    owners: NDArray[np.int32],
    loads: NDArray[np.int64],
    pins: NDArray[np.int32],
    limit: int,
) -> int:
    """Look at every block once; change owners, loads and pins in place. Returns the number of moves."""
    moves = 0
    for block in range(work.size):
        home = owners[block]
        _pin(nets, pins, block, home, -1)
        loads[home] -= work[block]
        fresh = _fresh_bytes(nets, pins, block)
        best = home
        is_over = loads[home] + work[block] > limit
        for rank in range(loads.size):
            if rank == home or loads[rank] + work[block] > limit:
                continue
            must_leave = best == home and is_over
            as_good = fresh[rank] == fresh[best] and best != home and loads[rank] < loads[best]
            if must_leave or fresh[rank] < fresh[best] or as_good:
                best = rank
        owners[block] = best
        loads[best] += work[block]
        _pin(nets, pins, block, best, 1)
        moves += best != home
    return moves
