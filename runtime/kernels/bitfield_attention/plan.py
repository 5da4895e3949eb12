"""The tile lists of a mask, by query block and by key block: made once, used by every layer."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from runtime.kernels.bitfield_attention.head_tiles import padded_width
from runtime.kernels.bitfield_attention.launch import LaunchShape
from runtime.kernels.bitfield_attention.mask import KernelMask
from runtime.kernels.bitfield_attention.tasks import Tasks
from runtime.kernels.bitfield_attention.tiles import check_device, classify, listed
from runtime.kernels.bitfield_attention.tilings import Tiling

# Shape suffixes: R = query blocks, C = key blocks, L = blocks of one side.

SMALLEST_BLOCK = 16
BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """For every block of one side, the blocks of the other side it meets: FULL tiles first.

    Args:
        offsets: [L+2] int32, where each block's list starts; that of block L is empty.
        partial_start: [L+1] int32, where its PARTIAL tiles start.
        others: int32 block indices of the other side, ascending in each part; room for all R C tiles.
        num_full, num_partial: [L] int32.
    """

    offsets: Tensor
    partial_start: Tensor
    others: Tensor
    num_full: Tensor
    num_partial: Tensor

    def __len__(self) -> int:
        return len(self.num_full)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """As kernels take them."""
        return self.offsets, self.partial_start, self.others


@dataclass(frozen=True, slots=True, eq=False)
class KernelPlan:
    """What the kernels walk, on the mask's device. It belongs to a mask, not to a head count or dtype.

    `launches` remembers the task tables of the launch shapes met so far, so a layer that was run once
    launches its kernels and nothing else.
    """

    num_queries: int
    num_keys: int
    block_q: int
    block_k: int
    rows: Lists
    columns: Lists
    launches: dict[LaunchShape, Tasks] = field(default_factory=dict, repr=False)

    def launched(self, mask: KernelMask, tile: Tiling, width: int) -> dict[str, Any]:
        """What every matrix kernel is compiled for, and how it is launched."""
        return {
            "D": width,
            "W": padded_width(width),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "LIST_Q": self.block_q,
            "LIST_K": self.block_k,
            "HAS_WINDOW": mask.has_window,
            "HAS_SEGMENTS": mask.has_segments,
            "PRECISION": "ieee",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": True,
        }


def make_plan(mask: KernelMask, *, block_q: int = BLOCK, block_k: int = BLOCK) -> KernelPlan:
    """The exact tiles of a mask. Seven launches on its device, and the host waits for none.

    A tile that reaches past the last query or key counts as PARTIAL: the loops over FULL tiles test
    no bounds.

    Raises:
        ValueError: a block size that is no power of two of at least 16; a device without the kernels.

    Memory: 8 R C bytes.
    """
    _check_block("block_q", block_q)
    _check_block("block_k", block_k)
    check_device(mask.device)
    return launched_plan(mask, block_q, block_k)


def launched_plan(mask: KernelMask, block_q: int, block_k: int) -> KernelPlan:
    """`make_plan` without its checks: for a driver that compiles and launches nothing, on any device."""
    kinds_RC = classify(mask, block_q, block_k)
    return KernelPlan(
        num_queries=mask.num_queries,
        num_keys=mask.num_keys,
        block_q=block_q,
        block_k=block_k,
        rows=_lists(kinds_RC),
        columns=_lists(kinds_RC.T),
    )


def _lists(kinds_LX: Tensor) -> Lists:
    counts, offsets, partial_start, others = listed(kinds_LX)
    return Lists(offsets, partial_start, others, num_full=counts[0], num_partial=counts[1])


def _check_block(name: str, block: int) -> None:
    if block < SMALLEST_BLOCK or block & (block - 1):
        nearest = max(SMALLEST_BLOCK, 1 << max(block, 1).bit_length() - 1)
        raise ValueError(
            f"{name}: want a power of two of at least {SMALLEST_BLOCK}, got {block}; try {nearest}"
        )
