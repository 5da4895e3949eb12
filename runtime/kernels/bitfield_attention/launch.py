"""The task table of one launch on its device, and what the launch must know of the machine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split, make_tasks

L2_SHARE = 0.8  # of the cache, for the keys and values of the heads that run together


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What the split of a plan's lists depends on besides the plan.

    Args:
        by_column: lists of key blocks (dK, dV) instead of query blocks.
        repeat: how often a task's list is walked, once for each query head of a group.
        num_heads: heads that run the table, over the whole batch.
        slots: tasks that run at once.
    """

    by_column: bool
    repeat: int
    num_heads: int
    slots: int
    split: Split | FixedSplit


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A task table on its device; see `Tasks` for entries that are only room.

    Args:
        tasks: [4, num tasks] int32: block, begin, end, slot.
        split_block: [num split] int32.
        split_start: [num split + 1] int32.
        num_slots: partial results that there is room for.
    """

    tasks: Tensor
    split_block: Tensor
    split_start: Tensor
    num_slots: int

    @property
    def num_tasks(self) -> int:
        return self.tasks.shape[1]


def make_launch(num_full: Tensor, num_partial: Tensor, shape: LaunchShape) -> Launch:
    """Schedule the lists for that shape, on their device."""
    tasks = make_tasks(
        num_full,
        num_partial,
        num_heads=shape.num_heads,
        num_slots=shape.slots,
        split=shape.split,
        repeat=shape.repeat,
    )
    return Launch(tasks.table, tasks.split_block, tasks.split_start, tasks.num_slots)


def resident_tasks(device: torch.device, num_warps: int) -> int:
    """Tasks that run at once: one block of 8 warps or two of 4 on each multiprocessor.

    An assumption about registers and shared memory, not a measurement. One off the GPU, where
    tasks run one after the other and splitting cannot pay.
    """
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * max(1, 8 // num_warps)


def section_heads(device: torch.device, kv_head_bytes: int, group: int, num_heads: int) -> int:
    """Query heads whose keys and values share the L2 cache: sections of the grid, whole groups."""
    if device.type != "cuda":
        return num_heads
    cache_bytes = L2_SHARE * torch.cuda.get_device_properties(device).L2_cache_size
    return min(num_heads, group * max(1, int(cache_bytes // kv_head_bytes)))
