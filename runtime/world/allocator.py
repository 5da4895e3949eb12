"""Keeps freed memory in the process, so that later steps cause few page faults."""

import ctypes
import platform

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # options of mallopt, glibc's malloc.h
NEVER = 2**31 - 1  # the largest int of C: a heap that is never trimmed


def keep_freed_memory() -> bool:
    """Configure glibc to reuse freed memory instead of returning it to the system; returns whether it will.

    Activations of microbatches in flight are allocated and freed in every step. By default, large tensors are
    mapped every time and a shrinking heap is trimmed; either way the next step pays a page fault and a zeroed
    page for every 4 KiB. That takes up to a fifth of the iteration of a small model, and is absent where one
    layer is timed repeatedly. Memory grows to the peak of the first steps and stays there: a freed block can
    be a few bytes too small for the next aligned tensor, so the heap grows until neighbouring blocks are free
    together. Other C libraries are unaffected.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(TRIM_THRESHOLD, NEVER) == 1, mallopt(MMAP_MAX, 0) == 1])
