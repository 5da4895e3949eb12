"""Tiles of a mask: which blocks of queries need which blocks of keys, exactly, without a T x T mask."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.masks.bitfield import Bitfield, dense

PARTIAL = 1
FULL = 2

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

    def transposed(self) -> "Tiles":
        """The same tiles by block of keys: `columns` are then blocks of queries."""
        row = np.repeat(np.arange(self.num_row_blocks, dtype=np.int32), np.diff(self.row_offsets))
        order = np.argsort(self.columns, kind="stable")
        counts = np.bincount(self.columns, minlength=self.num_col_blocks)
        return Tiles(
            row_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            columns=row[order],
            kinds=self.kinds[order],
            block_q=self.block_k,
            block_k=self.block_q,
            num_col_blocks=self.num_row_blocks,
        )


def classify(queries: Bitfield, keys: Bitfield, block_q: int = 128, block_k: int = 128) -> Tiles:
    """The tiles of the mask of `queries` on `keys`."""
    offsets, columns, kinds = [0], [], []
    for start in range(0, len(queries), block_q):
        row = dense(queries.take(np.arange(start, min(start + block_q, len(queries)))), keys)
        for column in range(-(-len(keys) // block_k)):
            tile = row[:, column * block_k : (column + 1) * block_k]
            if tile.any():
                columns.append(column)
                kinds.append(FULL if tile.all() else PARTIAL)
        offsets.append(len(columns))
    return Tiles(
        row_offsets=np.array(offsets, np.int64),
        columns=np.array(columns, np.int32),
        kinds=np.array(kinds, np.uint8),
        block_q=block_q,
        block_k=block_k,
        num_col_blocks=-(-len(keys) // block_k),
    )


def row_work(tiles: Tiles) -> Counts:
    """int64[num_row_blocks]: tiles to compute in every row."""
    return np.diff(tiles.row_offsets)


def area(queries: Bitfield, keys: Bitfield) -> int:
    """Attended pairs: what the FLOP of an attention are counted by."""
    steps = range(0, len(queries), 128)
    return sum(int(dense(queries.take(np.arange(i, min(i + 128, len(queries)))), keys).sum()) for i in steps)
