"""Cores that the ranks of a node share: each of n active ranks runs at min(1, cores / n) of its speed."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from simpy.core import Environment

from sim.clock import after

Job = TypeVar("Job")


class SharedCores(Generic[Job]):
    """Exact processor sharing, simulated event by event.

    All active ranks progress at one rate, so one clock of completed work gives the order in which they end:
    work of d seconds that starts at clock w ends at clock w + d. Between two instants the clock advances by
    elapsed time x rate; at the instant of a predicted end it is set to exactly that end; it restarts from 0
    when no rank is active. So times do not depend on the order of processing within an instant.

    Args:
        env: the clock.
        num_cores: cores of the node.
        done: called with a job at the instant at which it ends.

    Complexity: O(log n) per start and end.
    """

    def __init__(self, env: Environment, num_cores: int, done: Callable[[Job], None]) -> None:
        self._env = env
        self._num_cores = num_cores
        self._done = done
        self._active: list[tuple[float, int, Job]] = []  # heap of (clock at the end, arrival, job)
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
        """Advance the clock to now and report the jobs that have ended."""
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
        """Schedule a wake-up at the first end, as if nothing started before it."""
        delay_s = (self._active[0][0] - self._clock_s) / self._rate()
        self._alarm_at_s = self._env.now + delay_s
        self._num_alarms += 1
        after(self._env, delay_s, self._ring, self._num_alarms)

    def _ring(self, alarm: int) -> None:
        if alarm != self._num_alarms:  # a job has started since
            return
        self._settle()
        if self._active:
            self._set_alarm()
