"""The garbage collector stands still while something large is built of which nothing is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 100_000  # objects, that are not walked again soon


@contextmanager
def collector_paused(many: int = MANY) -> Iterator[None]:
    """For a `with` block or, as a decorator, a function that makes 10^5 objects which all stay.

    The collector walks what is there again and again as it grows, which took half the time of lowering
    1,296 ranks. Where many were made meanwhile, they count as old at once: a collector that starts again
    would walk all of them. Old ones are hardly ever collected, so fewer are left young: a program that makes
    cycles step after step would keep them all. Where somebody keeps objects frozen, those stay so, and it is
    walked. One that stands still already stays so.

    Args:
        many: from how many objects on they count as old. Fewer of modules, which stay; not
            none, as asking whether somebody keeps objects frozen walks those.
    """
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            if gc.get_count()[0] >= many and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
