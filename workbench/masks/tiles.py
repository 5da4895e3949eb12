"""Tiles of a mask: which blocks of queries need which blocks of keys, exactly, without a T x T mask."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.masks.bitfield import Bitfield
from workbench.masks.pieces import key_blocks, query_blocks
from workbench.masks.tile_walk import RUN, Keys, Queries, Records, areas_of, expanded, runs_of, transpose

PARTIAL = 1
FULL = 2
LARGEST_BLOCK = 4096

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tiles:
    """Tiles that hold an attended pair, by block of queries (CSR); all others are empty and not stored.

    A tile is FULL when every pair of tokens that exist is attended, so the last tile of a row may be
    FULL and yet narrower than `block_k`: bounds are the kernel's to check.

    Args:
        row_offsets: int64[num_row_blocks + 1], the tiles of row block i are [offsets[i], offsets[i + 1]).
        columns: int32[nnz], block of keys of every tile, ascending within a row.
        kinds: uint8[nnz], PARTIAL (1) or FULL (2).
        block_q: queries of a block.
        block_k: keys of a block.
        num_col_blocks: blocks of keys.
    """

    row_offsets: Counts
    columns: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.uint8]
    block_q: int
    block_k: int
    num_col_blocks: int

    @property
    def num_row_blocks(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_tiles(self) -> int:
        return len(self.columns)

    def transposed(self) -> "Tiles":
        """The same tiles by block of keys: `columns` are then blocks of queries. O(tiles)."""
        offsets, rows, kinds = transpose(self.row_offsets, self.columns, self.kinds, self.num_col_blocks)
        return Tiles(
            row_offsets=offsets,
            columns=rows,
            kinds=kinds,
            block_q=self.block_k,
            block_k=self.block_q,
            num_col_blocks=self.num_row_blocks,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TileRuns:
    """The same tiles, run-length coded: a million causal tokens are 33 million tiles, and 16 thousand runs.

    Args:
        row_offsets: int64[num_row_blocks + 1], the runs of row block i are [offsets[i], offsets[i + 1]).
        runs: RUN[num_runs], the `first` block of keys, the `end` past its last one, the `kind`, PARTIAL (1)
            or FULL (2); ascending within a row, neighbours of one kind merged.
        block_q: queries of a block.
        block_k: keys of a block.
        num_col_blocks: blocks of keys.
    """

    row_offsets: Counts
    runs: Records
    block_q: int
    block_k: int
    num_col_blocks: int

    @property
    def num_row_blocks(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_tiles(self) -> int:
        return int(np.sum(self.runs["end"] - self.runs["first"], dtype=np.int64))

    def tiles(self) -> Tiles:
        """One entry per tile: 5 bytes each."""
        columns, kinds = np.empty(self.num_tiles, np.int32), np.empty(self.num_tiles, np.uint8)
        return Tiles(
            row_offsets=expanded(self.row_offsets, self.runs, columns, kinds),
            columns=columns,
            kinds=kinds,
            block_q=self.block_q,
            block_k=self.block_k,
            num_col_blocks=self.num_col_blocks,
        )


def classify(queries: Bitfield, keys: Bitfield, block_q: int = 128, block_k: int = 128) -> Tiles:
    """The tiles of the mask of `queries` on `keys`, exact for any two bitfields.

    Raises:
        ValueError: a block size that is not a power of two, 1 to 4096.

    Complexity: that of `classify_runs`, and 5 bytes per tile.
    """
    return classify_runs(queries, keys, block_q, block_k).tiles()


def classify_runs(queries: Bitfield, keys: Bitfield, block_q: int = 128, block_k: int = 128) -> TileRuns:
    """`classify`, run-length coded: for sequences with too many tiles to list.

    Each block of queries descends a tree of key summaries, so its cost is the number of changes along its
    row, not its length: O(T x pieces of a block) for the summaries, then O(runs x log T) in practice;
    O(blocks^2) if every tile differs from its neighbours. See `masks.pieces`.
    """
    _require_block("block_q", block_q)
    _require_block("block_k", block_k)
    if len(queries) and len(keys):
        row_offsets, runs = runs_of(*_summaries(queries, keys, block_q, block_k))
    else:
        row_offsets, runs = np.zeros(_num_blocks(queries, block_q) + 1, np.int64), np.empty(0, RUN)
    return TileRuns(
        row_offsets=row_offsets,
        runs=runs,
        block_q=block_q,
        block_k=block_k,
        num_col_blocks=_num_blocks(keys, block_k),
    )


def row_work(tiles: Tiles | TileRuns) -> Counts:
    """int64[num_row_blocks]: tiles to compute in every row."""
    if isinstance(tiles, Tiles):
        return np.diff(tiles.row_offsets)
    sizes = tiles.runs["end"] - tiles.runs["first"]
    sums = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    work: Counts = np.diff(sums[tiles.row_offsets])
    return work


def row_areas(queries: Bitfield, keys: Bitfield, block_q: int = 128) -> Counts:
    """int64[num_row_blocks]: attended pairs of every block of queries, exact.

    ValueError for a block size that is not a power of two, 1 to 4096. Complexity: as `classify_runs`,
    and O(log) per query of a piece that a diagonal or a window cuts.
    """
    _require_block("block_q", block_q)
    if not (len(queries) and len(keys)):
        return np.zeros(_num_blocks(queries, block_q), np.int64)
    areas: Counts = areas_of(*_summaries(queries, keys, block_q, 128))
    return areas


def area(queries: Bitfield, keys: Bitfield) -> int:
    """Attended pairs, exact: the unit of an attention's FLOP."""
    return int(row_areas(queries, keys).sum())


def _summaries(queries: Bitfield, keys: Bitfield, block_q: int, block_k: int) -> tuple[Queries, Keys]:
    query_summary, key_summary = query_blocks(queries, block_q), key_blocks(keys, block_k)
    return (
        (query_summary.pieces, query_summary.offsets, query_summary.position, query_summary.first),
        (
            key_summary.pieces,
            key_summary.offsets,
            key_summary.position,
            key_summary.tree,
            key_summary.level_offsets,
        ),
    )


def _num_blocks(field: Bitfield, block: int) -> int:
    return -(-len(field) // block)


def _require_block(name: str, size: int) -> None:
    if not 1 <= size <= LARGEST_BLOCK or size & (size - 1):
        nearest = min(LARGEST_BLOCK, 1 << max(0, size - 1).bit_length())
        raise ValueError(
            f"{name} must be a power of two, 1 to {LARGEST_BLOCK}, got {size}; the next one is {nearest}"
        )
