"""Names of a step and its actions in a recording of torch.profiler, as `workbench ingest` reads them.

They are torch.distributed.pipelining's: `PP:2F0`. Without a profiler nothing is recorded.
"""

from contextlib import AbstractContextManager, nullcontext

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

STEP = "PP:iteration"


def annotated(action: object) -> AbstractContextManager[object]:
    """Around the work of an action, and not around what it waits for."""
    return named(f"PP:{action}")


def named(name: str) -> AbstractContextManager[object]:
    """A range of that name where a profiler records this thread."""
    # The check costs 0.2 microseconds; a range takes 20 of them even where nobody records it.
    return record_function(name) if _profiler_enabled() else nullcontext()
