"""Time that planning may take: one notion for every command that plans."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

from workbench.planner.stage_counts import Progress, StopWatch, silent


@dataclass(frozen=True, slots=True)
class Budget:
    """A time at which planning ends, by a clock.

    A planner is stopped when it next reports progress after the end, and hands over its best plan so far.

    Args:
        end_s: by the clock; infinite: never.
    """

    end_s: float = inf
    clock: Callable[[], float] = field(default=monotonic, repr=False)

    @property
    def left_s(self) -> float:
        """Seconds until the end; 0 or less: it is over."""
        return self.end_s - self.clock()

    def part(self, share: float) -> "Budget":
        """A share of the time that is left, from now on."""
        part_s = share * self.left_s
        return replace(self, end_s=self.clock() + part_s)

    def watch(self, progress: Progress = silent) -> StopWatch:
        """A progress callback that stops a planner at the end."""
        return StopWatch(self.clock, end_s=self.end_s, progress=progress)


UNLIMITED = Budget()


def starting_now(seconds: float, clock: Callable[[], float] = monotonic) -> Budget:
    """A budget of so many seconds."""
    return Budget(clock() + seconds, clock)
