"""Leases of preprocessing tasks: each task counts once, even if producers die."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

Task = tuple[int, int]  # (position of the batch in the stream, index in the batch)


@dataclass(frozen=True, slots=True)
class _Lease:
    producer: bytes
    end_s: float


class Leases:
    """Waiting tasks, and tasks leased to producers until a deadline.

    A task is returned when its lease ends or its producer dies, and only the first result of a task counts. A
    task that is given up stays open, for the caller to complete without a producer. Times are seconds of the
    caller's clock. Calls take O(log tasks), except `release`, `expire` and `drop`, which visit all tasks of
    the window.

    Args:
        lease_s: time limit of a producer for one task.
        most_attempts: how often a task is leased, as it may kill its producers.
    """

    def __init__(self, *, lease_s: float, most_attempts: int = 3) -> None:
        self._lease_s, self._most_attempts = lease_s, most_attempts
        self._waiting: list[Task] = []
        self._open: dict[Task, _Lease | None] = {}  # None: waiting
        self._attempts: dict[Task, int] = {}

    @property
    def num_waiting(self) -> int:
        return sum(lease is None for lease in self._open.values())

    @property
    def num_lent(self) -> int:
        return len(self._open) - self.num_waiting

    def holder(self, task: Task) -> bytes | None:
        """The producer that currently has the task."""
        lease = self._open.get(task)
        return None if lease is None else lease.producer

    def is_open(self, task: Task) -> bool:
        """Whether its first result is still expected."""
        return task in self._open

    def add(self, task: Task) -> None:
        """Add a task; ValueError where it is open already."""
        if task in self._open:
            raise ValueError(f"task {task} is open already")
        self._open[task], self._attempts[task] = None, 0
        heappush(self._waiting, task)

    def lend(self, producer: bytes, now_s: float) -> Task | None:
        """Lease the first waiting task, in order of the stream; None if there is none."""
        while self._waiting:
            task = heappop(self._waiting)
            if self._open.get(task, task) is None:
                self._open[task] = _Lease(producer, now_s + self._lease_s)
                self._attempts[task] += 1
                return task
        return None

    def complete(self, task: Task) -> bool:
        """Complete a task; returns whether this is its first result, as others are to be discarded."""
        if task not in self._open:
            return False
        self._forget(task)
        return True

    def release(self, producer: bytes) -> tuple[Task, ...]:
        """Take back a producer's tasks; returns those that are given up, after too many attempts."""
        return self._back(
            [task for task, lease in self._open.items() if lease is not None and lease.producer == producer]
        )

    def expire(self, now_s: float) -> tuple[Task, ...]:
        """Take back tasks whose lease ended; returns those that are given up, after too many attempts."""
        return self._back(
            [task for task, lease in self._open.items() if lease is not None and lease.end_s <= now_s]
        )

    def drop(self, position: int) -> None:
        """Drop all tasks of a batch that is no longer needed."""
        for task in [task for task in self._open if task[0] == position]:
            self._forget(task)
        self._waiting = [task for task in self._waiting if task[0] != position]
        heapify(self._waiting)

    def _back(self, tasks: list[Task]) -> tuple[Task, ...]:
        given_up = []
        for task in tasks:
            self._open[task] = None
            if self._attempts[task] >= self._most_attempts:
                given_up.append(task)
            else:
                heappush(self._waiting, task)
        return tuple(given_up)

    def _forget(self, task: Task) -> None:
        del self._open[task], self._attempts[task]
