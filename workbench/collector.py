"""The garbage collector stands still while something large is built of which nothing is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """For a `with` block or, as a decorator, a function that makes 10^5 objects which all stay.

    The collector walks what is there again and again as it grows, which took half the time of lowering
    1,296 ranks. One that stands still already stays so.
    """
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()
