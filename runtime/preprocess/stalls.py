"""How long a trainer waits for its batches, its step being an idle wait."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.preprocess.loader import Loader
from runtime.preprocess.stream import Skipped
from workbench.units import S_PER_DAY


@dataclass(frozen=True, slots=True)
class Stalls:
    """Per iteration, in seconds, and what the batches had in them."""

    stall_s: tuple[float, ...]
    num_examples: int
    skipped: tuple[Skipped, ...]

    def quantile_s(self, share: float) -> float:
        """The smallest stall that at least this share of the iterations does not exceed."""
        return sorted(self.stall_s)[max(0, math.ceil(share * len(self.stall_s)) - 1)]


def stalls_of(loader: Loader, num: int, *, step_s: float, told: Callable[[], None] = lambda: None) -> Stalls:
    """Take `num` batches, with an idle wait of `step_s` after each for the step on its device.

    Raises:
        ValueError: num < 1 or step_s < 0, or what the loader raises.
    """
    if num < 1 or not 0 <= step_s <= S_PER_DAY:
        raise ValueError(f"stalls: want >= 1 batch and a step of 0 s to a day, got {num} and {step_s}")
    stalls: list[float] = []
    num_examples = 0
    skipped: list[Skipped] = []
    for _ in range(num):
        start_s = time.perf_counter()
        batch = loader.next()
        stalls.append(time.perf_counter() - start_s)
        num_examples += len(batch.examples)
        skipped += batch.skipped
        told()
        time.sleep(step_s)
    return Stalls(tuple(stalls), num_examples, tuple(skipped))
