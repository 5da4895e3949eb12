"""Threads of which one runs at a time: whoever has the turn."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from runtime.world.failure import RankError


class Event(Protocol):
    """Something that a runner waits for while others run."""

    @property
    def is_done(self) -> bool:
        """Whether the runner can go on."""
        ...

    def describe(self) -> str:
        """What is missing, for error messages."""
        ...


class Ended(BaseException):
    """The scheduler has ended; unwinds a runner's thread."""


@dataclass(slots=True)
class Runner:
    """One thread, as its scheduler sees it.

    Args:
        rank: its name.
        place: where it stands, in whatever the scheduler counts.
        waits_for: what it needs before it can go on; None: only its turn.
        away_s: (from, until) of every time in which it did not run for itself.
        has_ended: its function returned or raised; `error` is what it raised.
    """

    rank: int
    place: int = -1
    waits_for: Event | None = None
    away_s: list[tuple[float, float]] = field(default_factory=list)
    has_ended: bool = False
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_here: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def can_go_on(self) -> bool:
        return not self.has_ended and (self.waits_for is None or self.waits_for.is_done)


class Turns:
    """Starts runners, gives one at a time its turn, and ends them all.

    A runner that is given its turn runs until it gives its turn back, which it does where the
    scheduler wants to decide who is next, and where it waits for another runner.

    Args:
        timeout_s: of one turn.
        now_s: the clock of what runners do; on a GPU one that first waits for all that was launched,
            as else a runner's kernels would run in the time of the next one.
    """

    def __init__(self, timeout_s: float, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._timeout_s, self._now_s = timeout_s, now_s
        self.runners: dict[int, Runner] = {}
        self._threads: list[threading.Thread] = []
        self._is_over = False

    def start(self, rank: int, run: Callable[[Runner], None]) -> None:
        """Make a thread that calls `run` when it is given its first turn."""
        runner = Runner(rank)
        self.runners[rank] = runner
        thread = threading.Thread(target=self._live, args=(runner, run), name=f"rank {rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def give(self, rank: int) -> None:
        """Let a runner have its turn; returns when it gives its turn back or ends.

        Raises:
            RankError: it did neither in time; and whatever it raised itself.
        """
        runner = self.runners[rank]
        runner.go.release()
        if not runner.is_here.acquire(timeout=self._timeout_s):
            raise RankError(
                f"rank {rank}: its turn did not end within {self._timeout_s:g} s (place {runner.place})"
            )
        if runner.error is not None:
            raise runner.error

    def bring(self, ranks: tuple[int, ...], is_there: Callable[[Runner], bool]) -> None:
        """Give turns, in the order of `ranks`, round after round, until all are there.

        Raises:
            RankError: nobody can go on; the message names whom each waits for.
        """
        while missing := [rank for rank in ranks if not is_there(self.runners[rank])]:
            able = [rank for rank in missing if self.runners[rank].can_go_on]
            if not able:
                stuck = "; ".join(_describe(self.runners[rank]) for rank in missing)
                raise RankError(f"no rank can continue: {stuck}")
            for rank in able:
                self.give(rank)

    def hand_back(self, runner: Runner, waits_for: Event | None = None) -> None:
        """Called by a runner: let others run, return when it is given its next turn."""
        left_s = self._now_s()
        runner.waits_for = waits_for
        runner.is_here.release()
        runner.go.acquire()  # released by `give`, or by `close`, which always comes
        if self._is_over:
            raise Ended
        runner.waits_for = None
        runner.away_s.append((left_s, self._now_s()))

    @contextmanager
    def aside(self, runner: Runner) -> Iterator[None]:
        """Called by a runner: what it does inside does not count as its own time."""
        left_s = self._now_s()
        try:
            yield
        finally:
            runner.away_s.append((left_s, self._now_s()))

    def close(self) -> None:
        """End all runners that have not ended; those in the middle of a turn end with it."""
        self._is_over = True
        for runner in self.runners.values():
            runner.go.release()
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _live(self, runner: Runner, run: Callable[[Runner], None]) -> None:
        runner.go.acquire()
        try:
            if not self._is_over:
                run(runner)
        except Ended:
            pass
        except BaseException as error:
            runner.error = error
        finally:
            runner.has_ended = True
            runner.is_here.release()


def _describe(runner: Runner) -> str:
    if runner.has_ended:
        return f"rank {runner.rank} has ended"
    waiting = "its turn" if runner.waits_for is None else runner.waits_for.describe()
    return f"rank {runner.rank} waits for {waiting}"
