"""Collectives of one tensor, under their names in the installed torch. Needs only torch."""

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SUM = dist.all_reduce


def tells_scattered(tensor: Tensor) -> bool:
    """Whether the end of a tensor's reduce-scatter is reported; gloo does not, on the host."""
    return not tensor.is_cpu


def free(tensor: Tensor) -> None:
    """Drop the memory of an ended collective's tensor now.

    A thread of gloo holds the tensor, the same one, for a moment longer than the wait for its collective.
    """
    tensor.data = tensor.new_empty(0)
