"""The tile lists of a mask, by query block and by key block: made once, used by every layer."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.launch import Launch, LaunchShape
from runtime.kernels.bitfield_attention.mask import KernelMask
from runtime.kernels.bitfield_attention.tiles import FULL, PARTIAL, summary_tiles

# Shape suffixes: R = query blocks, C = key blocks, N = tiles that hold work, L = blocks of one side.

SMALLEST_BLOCK = 16
BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """For every block of one side, the blocks of the other side it meets: FULL tiles first.

    Args:
        offsets: [L+1] int32, where each block's list starts.
        partial_start: [L] int32, where its PARTIAL tiles start.
        others: [N] int32 block indices of the other side, ascending in each part.
        num_full, num_partial: [L] int64 on the host, which schedules.
    """

    offsets: Tensor
    partial_start: Tensor
    others: Tensor
    num_full: np.ndarray
    num_partial: np.ndarray

    def __len__(self) -> int:
        return len(self.num_full)


@dataclass(frozen=True, slots=True, eq=False)
class KernelPlan:
    """What the kernels walk. It belongs to a mask, not to a head count or dtype.

    `launches` remembers the task tables of the launch shapes met so far.
    """

    num_queries: int
    num_keys: int
    block_q: int
    block_k: int
    rows: Lists
    columns: Lists
    launches: dict[LaunchShape, Launch] = field(default_factory=dict, repr=False)


def make_plan(mask: KernelMask, *, block_q: int = BLOCK, block_k: int = BLOCK) -> KernelPlan:
    """Plan from the mask alone, classified on its device by block summaries.

    Raises:
        ValueError: a block size that is no power of two of at least 16.
    """
    _check_block("block_q", block_q)
    _check_block("block_k", block_k)
    tiles = summary_tiles(mask, block_q, block_k)
    return plan_of_tiles(mask, *tiles, block_q=block_q, block_k=block_k)


def plan_of_tiles(
    mask: KernelMask,
    row_offsets: Tensor,
    columns: Tensor,
    kinds: Tensor,
    *,
    block_q: int,
    block_k: int,
) -> KernelPlan:
    """Plan from tiles that were classified elsewhere.

    Args:
        mask: gives the number of queries and keys, and the device.
        row_offsets: [R+1] int64, ascending from 0 to N.
        columns: [N] int32 key block of each tile.
        kinds: [N] uint8, PARTIAL (1) or FULL (2). An empty tile has no entry.

    A tile that reaches past the last query or key counts as PARTIAL: the loops over FULL tiles
    test no bounds.

    Raises:
        ValueError: a block size that is no power of two of at least 16, lists of the wrong
            length, a column out of range, an unknown kind.
    """
    _check_block("block_q", block_q)
    _check_block("block_k", block_k)
    num_rows, num_columns = -(-mask.num_queries // block_q), -(-mask.num_keys // block_k)
    _check_tiles(row_offsets, columns, kinds, num_rows, num_columns)
    device = mask.device
    row_offsets, columns, kinds = (x.to(device) for x in (row_offsets, columns, kinds))
    columns = columns.long()
    rows = torch.repeat_interleave(torch.arange(num_rows, device=device), row_offsets.diff())
    partial = kinds == PARTIAL
    if mask.num_queries % block_q:
        partial |= rows == num_rows - 1
    if mask.num_keys % block_k:
        partial |= columns == num_columns - 1
    return KernelPlan(
        num_queries=mask.num_queries,
        num_keys=mask.num_keys,
        block_q=block_q,
        block_k=block_k,
        rows=_lists(rows, columns, partial, num_rows),
        columns=_lists(columns, rows, partial, num_columns),
    )


def _lists(block_N: Tensor, other_N: Tensor, partial_N: Tensor, num_blocks: int) -> Lists:
    """Group tiles by (block, kind), keeping their order: a stable sort, so the result is determined."""
    part_N = block_N * 2 + partial_N
    order = torch.argsort(part_N, stable=True)
    counts = torch.bincount(part_N, minlength=2 * num_blocks).view(num_blocks, 2)
    ends = counts.flatten().cumsum(0).to(torch.int32)
    host = counts.cpu().numpy()
    return Lists(
        offsets=torch.nn.functional.pad(ends[1::2], (1, 0)),
        partial_start=ends[0::2].contiguous(),
        others=other_N[order].to(torch.int32),
        num_full=host[:, 0],
        num_partial=host[:, 1],
    )


def _check_block(name: str, block: int) -> None:
    if block < SMALLEST_BLOCK or block & (block - 1):
        nearest = max(SMALLEST_BLOCK, 1 << max(block, 1).bit_length() - 1)
        raise ValueError(
            f"{name}: want a power of two of at least {SMALLEST_BLOCK}, got {block}; try {nearest}"
        )


def _check_tiles(offsets: Tensor, columns: Tensor, kinds: Tensor, num_rows: int, num_columns: int) -> None:
    if offsets.shape != (num_rows + 1,):
        raise ValueError(
            f"row_offsets: want {num_rows + 1} for {num_rows} query blocks, got {tuple(offsets.shape)}"
        )
    if columns.shape != kinds.shape or columns.ndim != 1:
        raise ValueError(
            f"columns and kinds: want one entry per tile, got {tuple(columns.shape)} and {tuple(kinds.shape)}"
        )
    if columns.is_cuda:
        return  # made on the device by summary_tiles; reading it back would stall the stream
    if offsets[0] != 0 or offsets[-1] != len(columns) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"row_offsets: want ascending from 0 to {len(columns)}, got {offsets.tolist()}")
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < num_columns:
        raise ValueError(
            f"columns: want 0 to {num_columns - 1}, got {int(columns.min())} to {int(columns.max())}"
        )
    unknown = set(kinds.unique().tolist()) - {PARTIAL, FULL}
    if unknown:
        raise ValueError(f"kinds: want {PARTIAL} (partial) or {FULL} (full), got {sorted(unknown)}")
