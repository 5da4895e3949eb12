"""Names of a step and its actions in recordings of torch.profiler, as `workbench ingest` reads them.

Names are those of torch.distributed.pipelining: `PP:2F0`. Without a profiler nothing is recorded.
"""

from contextlib import AbstractContextManager, nullcontext

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

STEP = "PP:iteration"


def annotated(action: object) -> AbstractContextManager[object]:
    """Context of the work of an action, without its waits."""
    return named(f"PP:{action}")


def named(name: str) -> AbstractContextManager[object]:
    """A range of that name, if a profiler records this thread."""
    # The check takes 0.2 microseconds; a range takes 20 even where it is not recorded.
    return record_function(name) if _profiler_enabled() else nullcontext()
