"""Waits of tests: for what holds some time, and for peers that never come."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

PATIENCE_S = 60.0  # longer than anything takes but a hang, on however busy a machine
LOOK_EVERY_S = 0.01
LONGEST_LOOK_S = 0.2  # that counts


def eventually(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Whether it holds before so many seconds are over.

    A look that took longer counts no more than `LONGEST_LOOK_S`: a machine that pauses, or has no core for
    this process, has none for those that it waits for.
    """
    left_s, now_s = within_s, time.monotonic()
    while not (does := holds()) and left_s > 0:
        time.sleep(LOOK_EVERY_S)
        before_s, now_s = now_s, time.monotonic()
        left_s -= min(now_s - before_s, LONGEST_LOOK_S)
    return does


def impatient_group(wait_s: float) -> dist.ProcessGroup:
    """Of the first two ranks: patient while it forms, which takes as long as the machine is busy."""
    group = dist.new_group([0, 1])
    _set_pg_timeout(timedelta(seconds=wait_s), group)
    return group
