"""Cores that the ranks of a node share: each of n active ranks runs at min(1, cores / n) of its speed."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from simpy.core import Environment

from sim.clock import after

Job = TypeVar("Job")


class SharedCores(Generic[Job]):
    """Exact processor sharing, event by event.

    All active ranks progress at one rate, so one clock of work done tells the order in which
    they end: work of d seconds handed in at clock w ends when the clock shows w + d. Between
    two instants the clock advances by elapsed x rate; at the instant of a predicted end it
    shows exactly that end; it restarts from 0 when nobody works. So times do not depend on
    what happens to be processed first within an instant.

    Args:
        env: the clock.
        num_cores: cores of the node.
        done: called with a job in the instant in which it ends.

    Complexity: O(log n) per start and end.
    """

    def __init__(self, env: Environment, num_cores: int, done: Callable[[Job], None]) -> None:
        self._env = env
        self._num_cores = num_cores
        self._done = done
        self._active: list[tuple[float, int, Job]] = []  # (clock at its end, arrival, job), a heap
        self._arrivals = count()
        self._clock_s = 0.0
        self._clock_set_at_s = 0.0
        self._num_alarms = 0
        self._alarm_at_s = 0.0

    def work(self, duration_s: float, job: Job) -> None:
        """Start a job that takes `duration_s` on a core of its own."""
        self._settle()
        heappush(self._active, (self._clock_s + duration_s, next(self._arrivals), job))
        self._set_alarm()

    def _settle(self) -> None:
        """Bring the clock to now and let go of what has ended."""
        now = self._env.now
        if self._active:
            first_end_s = self._active[0][0]
            clock_s = self._clock_s + (now - self._clock_set_at_s) * self._rate()
            self._clock_s = first_end_s if now == self._alarm_at_s else min(clock_s, first_end_s)
        self._clock_set_at_s = now
        while self._active and self._active[0][0] <= self._clock_s:
            job = heappop(self._active)[2]
            after(self._env, 0.0, self._done, job)
        if not self._active:
            self._clock_s = 0.0

    def _rate(self) -> float:
        return min(1.0, self._num_cores / len(self._active))

    def _set_alarm(self) -> None:
        """For the first end, were nothing to start before it."""
        delay_s = (self._active[0][0] - self._clock_s) / self._rate()
        self._alarm_at_s = self._env.now + delay_s
        self._num_alarms += 1
        after(self._env, delay_s, self._ring, self._num_alarms)

    def _ring(self, alarm: int) -> None:
        if alarm != self._num_alarms:  # something started after it was set
            return
        self._settle()
        if self._active:
            self._set_alarm()
