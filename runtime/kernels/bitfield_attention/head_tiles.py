"""Tiles of one head as the copy engine (TMA) of Hopper and newer GPUs reads them, or adds to them."""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Shape suffixes: B = batch, H = heads, T = tokens, D = head width.

STEP_BYTES = 16  # of the engine: the base and every stride are multiples


def has_engine(device: torch.device) -> bool:
    """Whether tiles are read by the engine. On older GPUs descriptors turn into loads that spill kilobytes.

    Off the GPU (Triton's interpreter) they are, as on Hopper.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def padded_width(head_dim: int) -> int:
    """Columns of a tile in registers: the next power of two. Memory holds `head_dim`."""
    return 1 << (head_dim - 1).bit_length()


def head_tiles(x_BHTD: Tensor, block: int) -> TensorDescriptor:
    """Tiles [1, 1, block, padded width] of a tensor; what lies beyond tokens or width reads as zero.

    A tensor that the engine cannot read where it lies is copied: `aligned`.
    """
    x_BHTD = aligned(x_BHTD)
    width = x_BHTD.shape[-1]
    # A dim of one has any stride at all in torch, and a legal one here.
    strides = [s if n > 1 else width for n, s in zip(x_BHTD.shape[:3], x_BHTD.stride(), strict=False)]
    return TensorDescriptor(x_BHTD, list(x_BHTD.shape), [*strides, 1], [1, 1, block, padded_width(width)])


def sum_tiles(sums_BHRD: Tensor, block: int) -> TensorDescriptor:
    """Tiles [block, padded width] of the rows of all heads, to add to; nothing is beyond the width.

    The sums are contiguous float32. Rows are numbered over all heads, which no GPU holds 2**31 of.
    """
    width = sums_BHRD.shape[-1]
    return TensorDescriptor.from_tensor(sums_BHRD.view(-1, width), [block, padded_width(width)])


def aligned(x_BHTD: Tensor) -> Tensor:
    """The tensor itself where base and strides suit the copy engine, else a contiguous copy."""
    step = STEP_BYTES // x_BHTD.element_size()
    moving = [s for n, s in zip(x_BHTD.shape[:3], x_BHTD.stride(), strict=False) if n > 1]
    suits = x_BHTD.stride(-1) == 1 and x_BHTD.data_ptr() % STEP_BYTES == 0
    if suits and all(s > 0 and s % step == 0 for s in moving):
        return x_BHTD
    return x_BHTD.clone(memory_format=torch.contiguous_format)
