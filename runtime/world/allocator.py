"""Keeps freed memory with the process, so that steady steps touch few pages for the first time."""

import ctypes
import platform

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # options of mallopt, glibc's malloc.h
NEVER = 2**31 - 1  # the largest int of C: a heap that is never trimmed


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed memory rather than hand it back to the system; whether it will.

    Activations of the microbatches in flight come and go with every step. By default large
    tensors are mapped anew and a heap that shrinks is trimmed; either way the next step pays
    a page fault and a page of zeros for every 4 KiB. That is up to a fifth of the iteration of
    a small model, and is not paid where one layer is timed again and again. Memory grows to
    the peak of the first steps and stays there: a freed piece can be a few bytes too small for
    the next aligned tensor, so the heap grows until neighbouring pieces are free together.
    Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(TRIM_THRESHOLD, NEVER) == 1, mallopt(MMAP_MAX, 0) == 1])
