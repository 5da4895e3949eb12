"""Candidates evaluated here or by several processes, in the order in which they were asked for."""

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing.queues import Queue
from threading import Thread
from typing import Protocol, TypeVar, cast

from workbench.collector import collector_paused
from workbench.search.joint.choice import Choice
from workbench.search.joint.evaluate import Asked, Judge, Outcome, evaluated
from workbench.search.joint.move import Space
from workbench.search.joint.starts import Start, Task, start_of
from workbench.stopped import LOOK_EVERY_S, StopWatch
from workbench.supervised import Parent, as_parent, end_with

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
Known = tuple[Space, Judge]
CHUNK = 4  # candidates that a worker gets at once
FLUSHED_EVERY_S = 0.001


def chunks_of(asked: Sequence[Asked]) -> list[Sequence[Asked]]:
    """What workers get at once."""
    return [asked[first : first + CHUNK] for first in range(0, len(asked), CHUNK)]


class Workers(Protocol):
    """What evaluates; results come in the order of what was asked, and the caller may stop asking.

    Args:
        num: how many at once.
    """

    num: int

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        """The plan of every strategy."""

    def outcomes(self, space: Space, asked: Sequence[Asked]) -> Iterator[Outcome]:
        """What becomes of every candidate."""


class InProcess(Workers):
    """This process, one after the other."""

    num = 1

    def __init__(self, space: Space, judge: Judge) -> None:
        self._space, self._judge = space, judge

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        for task in tasks:
            yield start_of(task, self._space.cost, self._judge)

    def outcomes(self, space: Space, asked: Sequence[Asked]) -> Iterator[Outcome]:
        for each in asked:
            yield evaluated(space, self._judge, each)


class LocalProcesses(Workers):
    """Processes of this machine that end with it; one that dies is replaced, and what it had is done again.

    What they are told is pickled here and not by a thread of a queue: beside it this one goes on, and objects
    that keep what was asked of them change while they are written. A process that a signal stops for long,
    from the instant of its start on, is killed, and so replaced.
    """

    def __init__(self, space: Space, judge: Judge, num: int) -> None:
        self._bare, self._judge, self.num = replace(space, starts={}), judge, num
        self._pool, self._watch = self._opened(), StopWatch()

    def _opened(self) -> ProcessPoolExecutor:
        """What workers know comes by a queue, from a thread: one that stops at its start holds up nobody."""
        context = multiprocessing.get_context("spawn")
        known: Queue[bytes] = context.Queue()
        known.cancel_join_thread()
        pickled = pickle.dumps((self._bare, self._judge))
        for _ in range(self.num):
            known.put(pickled)
        return ProcessPoolExecutor(
            self.num, mp_context=context, initializer=_remember, initargs=(known, as_parent())
        )

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        yield from self._each(_start, list(tasks))

    def outcomes(self, space: Space, asked: Sequence[Asked]) -> Iterator[Outcome]:
        chunks = [(space.starts, chunk) for chunk in chunks_of(asked)]
        for found in self._each(_outcomes, chunks):
            yield from found

    def _each(self, work: Callable[[_Task], _Result], tasks: list[_Task]) -> Iterator[_Result]:
        done = 0
        lost = 0
        while done < len(tasks):
            futures = [self._pool.submit(_done, work, pickle.dumps(task)) for task in tasks[done:]]
            try:
                for future in futures:
                    yield self._result(future)
                    done += 1
            except BrokenProcessPool:
                lost += 1
                if lost > len(tasks):
                    raise
                self._pool = self._opened()
            finally:
                for future in futures:
                    future.cancel()

    def _result(self, future: "Future[_Result]") -> _Result:
        while True:
            try:
                return future.result(LOOK_EVERY_S)
            except TimeoutError:
                if future.done():
                    raise
                for process in self._watch.stopped(self._processes):
                    name = f"search worker, process {process}"
                    sys.stderr.write(f"{name}: stopped by a signal and not continued, so killed\n")
                    _kill(process)

    @property
    def _processes(self) -> tuple[int, ...]:
        """The pool's own record: it starts them when it wants to, and tells nobody."""
        return tuple(self._pool._processes or ())

    def close(self) -> None:
        """End the processes, whatever they do."""
        processes = self._processes
        manager = cast(Thread | None, self._pool._executor_manager_thread)
        self._pool.shutdown(wait=False, cancel_futures=True)
        # In Python 3.11 the pool's thread fails if a process dies before it took what is cancelled away.
        end_s = time.monotonic() + LOOK_EVERY_S
        while self._pool._cancel_pending_futures and manager is not None and manager.is_alive():
            if time.monotonic() > end_s:
                break
            time.sleep(FLUSHED_EVERY_S)
        for process in processes:
            _kill(process)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


_known: list[Known] = []  # of a worker process


def _remember(known: "Queue[bytes]", parent: Parent) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    _known.append(pickle.loads(known.get()))


def _done(work: Callable[[_Task], _Result], pickled: bytes) -> _Result:
    return work(pickle.loads(pickled))


def _start(task: Task) -> Start:
    space, judge = _known[-1]
    return start_of(task, space.cost, judge)


@collector_paused()
def _outcomes(task: tuple[dict[str, Choice], Iterable[Asked]]) -> list[Outcome]:
    starts, asked = task
    space, judge = _known[-1]
    here = replace(space, starts=starts)
    return [evaluated(here, judge, each) for each in asked]
