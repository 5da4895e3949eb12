"""Evaluate candidates here or in several processes, in the order of the requests."""

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing.queues import Queue
from threading import Thread
from typing import Protocol, TypeVar, cast

from workbench.collector import collector_paused
from workbench.search.joint.choice import Choice
from workbench.search.joint.evaluate import Judge, Outcome, Request, evaluate
from workbench.search.joint.move import Space
from workbench.search.joint.starts import Start, Task, start_of
from workbench.stopped import LOOK_EVERY_S, StopWatch
from workbench.supervised import Parent, as_parent, end_with
from workbench.termination import uninterrupted

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
CHUNK = 4  # candidates per task of a worker
FLUSHED_EVERY_S = 0.001


def chunks_of(requests: Sequence[Request]) -> list[Sequence[Request]]:
    """Split the requests into tasks for workers."""
    return [requests[first : first + CHUNK] for first in range(0, len(requests), CHUNK)]


class Workers(Protocol):
    """Evaluate tasks and yield the results in the order of the requests; the caller may stop early.

    Args:
        num: parallel workers.
    """

    num: int

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        """The plan of every strategy."""

    def outcomes(self, space: Space, requests: Sequence[Request]) -> Iterator[Outcome]:
        """The outcome of every candidate."""


class InProcess(Workers):
    """Evaluate in this process, one after the other."""

    num = 1

    def __init__(self, space: Space, judge: Judge) -> None:
        self._space, self._judge = space, judge

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        for task in tasks:
            yield start_of(task, self._space.cost, self._judge)

    def outcomes(self, space: Space, requests: Sequence[Request]) -> Iterator[Outcome]:
        for request in requests:
            yield evaluate(space, self._judge, request)


class Evaluator:
    """What a worker process does; it holds the search's job, and so all cached prices."""

    def __init__(self, space: Space, judge: Judge) -> None:
        self._space, self._judge = space, judge

    def start(self, task: Task) -> Start:
        return start_of(task, self._space.cost, self._judge)

    def outcomes(self, task: tuple[dict[str, Choice], Sequence[Request]]) -> list[Outcome]:
        """The outcomes of requests, from these starts."""
        starts, requests = task
        here = replace(self._space, starts=starts)
        return [evaluate(here, self._judge, request) for request in requests]


class LocalProcesses(Workers):
    """Processes that end with this one; one that dies is replaced, and its tasks are repeated.

    Tasks are pickled here and not by a queue's thread: this thread runs on beside it, and objects with
    caches change while they are written. A process that a signal stops for long, even while it starts, is
    killed and replaced.
    """

    def __init__(self, space: Space, judge: Judge, num: int) -> None:
        self._space, self._judge, self.num = replace(space, starts={}), judge, num
        self._pool, self._watch = self._open(), StopWatch()

    def _open(self) -> ProcessPoolExecutor:
        """Start the pool; workers read their space from a queue, so that a stopped one blocks nobody."""
        context = multiprocessing.get_context("spawn")
        known: Queue[bytes] = context.Queue()
        known.cancel_join_thread()
        pickled = pickle.dumps((self._space, self._judge))
        for _ in range(self.num):
            known.put(pickled)
        return ProcessPoolExecutor(
            self.num, mp_context=context, initializer=_initialize, initargs=(known, as_parent())
        )

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        yield from self._results(_start, list(tasks))

    def outcomes(self, space: Space, requests: Sequence[Request]) -> Iterator[Outcome]:
        chunks = [(space.starts, chunk) for chunk in chunks_of(requests)]
        for outcomes in self._results(_outcomes, chunks):
            yield from outcomes

    def _results(self, work: Callable[[_Task], _Result], tasks: list[_Task]) -> Iterator[_Result]:
        num_done = 0
        num_broken = 0
        while num_done < len(tasks):
            with uninterrupted():  # the first starts the processes
                futures = [
                    self._pool.submit(_run_pickled, work, pickle.dumps(task)) for task in tasks[num_done:]
                ]
            try:
                for future in futures:
                    yield self._result(future)
                    num_done += 1
            except BrokenProcessPool:
                num_broken += 1
                if num_broken > len(tasks):
                    raise
                self._pool = self._open()
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
        """Process ids from the pool's private record: it starts processes on demand."""
        return tuple(self._pool._processes or ())

    def close(self) -> None:
        """Kill the processes, even if busy."""
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


_known: list[Evaluator] = []  # set in worker processes


def _initialize(known: "Queue[bytes]", parent: Parent) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    _known.append(Evaluator(*pickle.loads(known.get())))


def _run_pickled(work: Callable[[_Task], _Result], pickled: bytes) -> _Result:
    return work(pickle.loads(pickled))


def _start(task: Task) -> Start:
    return _known[-1].start(task)


@collector_paused()
def _outcomes(task: tuple[dict[str, Choice], Sequence[Request]]) -> list[Outcome]:
    return _known[-1].outcomes(task)
