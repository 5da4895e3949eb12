"""What decides how a plan's lists become the tasks of one launch, and what that must know of the machine."""

from dataclasses import dataclass

import torch

from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split

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
