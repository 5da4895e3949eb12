"""A pool of forked gloo workers, reused from job to job."""

import gc
import multiprocessing
import multiprocessing.connection as mpc
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.world.allocator import keep_freed_memory
from runtime.world.answers import packed
from runtime.world.cores import Keepers, cores_of
from runtime.world.failure import Failure, WorldFailed, death_of, failure_of, root_cause
from runtime.world.local_world import join_here
from runtime.world.scratch import ScratchFolder
from workbench.stopped import LOOK_EVERY_S, stopped_are_killed
from workbench.supervised import Parent, as_parent, end_with
from workbench.termination import ended_by_default, forking

GRACE_S = 2.0  # limit for others' reports after the first failure
JOIN_S = 5.0
NOTHING_DONE = -1
LEAVE = b"leave"


@dataclass(frozen=True, slots=True)
class Place:
    """The process of a job, among those of its world.

    Args:
        process: index of this process in the job's world.
        size: of the world.
        report: reports this process's progress to the parent, as a position in units of the job.
        tell: sends the parent a message at once; dropped if it does not listen.
    """

    process: int
    size: int
    report: Callable[[int], None]
    tell: Callable[[object], None] = lambda news: None


Job = Callable[..., Any]  # (place, *args) -> picklable result; itself picklable


@dataclass(slots=True)
class _Worker:
    process: ForkProcess
    pipe: mpc.Connection
    is_stopped: bool = False  # whether it was stopped by a signal, for which it is killed

    def note_stop(self) -> None:
        self.is_stopped = True


@dataclass(frozen=True, slots=True)
class _News:
    """A message of a running job."""

    content: object


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    job: Job
    args: tuple[Any, ...]
    process: int
    size: int
    store: Path
    cores: frozenset[int]
    wait_s: float
    is_listening: bool


@dataclass(slots=True)
class Pool:
    """At most `num_workers` processes; a job takes the first `size` of them as its world.

    Workers are forked from this process, which has already imported torch, so a world is ready in tens of
    milliseconds. Each job gets its own process group, which is destroyed afterwards. A process that has
    succeeded stays in the group until all have answered: leaving would close the connections of processes
    that are still joining, or still waiting in a completed collective. A process that fails leaves at once,
    which ends the others. All that failed or did not answer are killed and forked again for the next job:
    torch numbers its groups, and in a process that could not join, the numbers no longer agree with the
    others'. While a job runs that has a core for each of its processes, these cores are kept awake.
    """

    num_workers: int
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _keepers: Keepers = field(default_factory=Keepers)
    _positions: Any = None
    _context: ForkContext = field(default_factory=lambda: multiprocessing.get_context("fork"))
    _folder: ScratchFolder = field(default_factory=lambda: ScratchFolder("ranks-"))
    _num_jobs: int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"a pool needs at least one worker, got {self.num_workers}")
        torch.set_num_threads(1)  # a forked child would inherit a thread pool without its threads
        self._positions = self._context.RawArray("i", self.num_workers)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        job: Job,
        size: int,
        *args: Any,
        timeout_s: float = 60.0,
        wait_s: float | None = None,
        where: Callable[[int, int], str] = lambda process, position: f"process {process}",
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run `job(place, *args)` on `size` processes; returns results in process order.

        If there are at least as many cores as processes, each is pinned to one.

        Args:
            job: a function that pickles by name; so must its arguments and results.
            size: number of processes.
            timeout_s: of the whole job.
            wait_s: of every collective in it; None: that of the job.
            where: describes a process and its reported position, for error messages.
            on_message: called with a process and its message, on arrival. None: messages are dropped.

        Raises:
            ValueError: the pool is too small, or every failing process refused its input.
            WorldFailed: a process died, raised, or did not finish in time. All are killed.
        """
        if not 1 <= size <= self.num_workers:
            raise ValueError(f"the pool has {self.num_workers} workers, the job wants {size}")
        self._fork_missing(size)
        self._keep_awake(size)
        workers = [self._workers[process] for process in range(size)]
        self._num_jobs += 1
        store = self._folder.path / f"store{self._num_jobs}"
        wait_s = timeout_s if wait_s is None else min(wait_s, timeout_s)
        try:
            with stopped_are_killed({worker.process.pid or 0: worker.note_stop for worker in workers}):
                for process, cores in enumerate(cores_of(size)):
                    order = _Order(
                        job=job,
                        args=args,
                        process=process,
                        size=size,
                        store=store,
                        cores=cores,
                        wait_s=wait_s,
                        is_listening=on_message is not None,
                    )
                    self._send(order)
                results, failures, missing = self._collect(size, time.monotonic() + timeout_s, on_message)
        except BaseException:  # interrupted: workers' late messages must not reach the next job
            for process in range(size):
                self._end(process)
            raise
        finally:
            self._keepers.rest()
        self._dismiss(results, [*missing, *(failure.process for failure in failures)])
        store.unlink(missing_ok=True)
        if not failures and not missing:
            return [results[process] for process in range(size)]
        raise self._explain(failures, missing, timeout_s, where)

    def _send(self, order: _Order) -> None:
        self._positions[order.process] = NOTHING_DONE
        with suppress(BrokenPipeError):  # its death is detected when answers are collected
            self._workers[order.process].pipe.send_bytes(pickle.dumps(order))

    def _dismiss(self, done: Iterable[int], broken: Iterable[int]) -> None:
        """Let successful processes leave their world, and kill the others: the next job forks them again."""
        for process in done:
            self._let_go(process)
        for process in broken:
            self._end(process)

    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the live workers, in process order."""
        return tuple(self._workers[i].process.pid or 0 for i in sorted(self._workers))

    def all_process_ids(self) -> tuple[int, ...]:
        """Process ids of the workers and their helper processes."""
        return (*self.process_ids(), *self._keepers.process_ids)

    def position(self, process: int) -> int:
        """The last position that a process reported."""
        return int(self._positions[process])

    def close(self) -> None:
        """End all workers."""
        for process in list(self._workers):
            self._end(process)
        self._keepers.close()
        self._folder.close()

    def _fork_missing(self, size: int) -> None:
        for process in range(size):
            worker = self._workers.get(process)
            if worker is not None and not worker.process.is_alive():
                self._end(process)
            if process not in self._workers:
                self._workers[process] = self._fork(process)

    def _keep_awake(self, size: int) -> None:
        """Keep the cores of that many processes awake; none if they share cores."""
        cores = cores_of(size)
        if all(len(process_cores) == 1 for process_cores in cores) and len(set(cores)) == size:
            self._keepers.wake(min(process_cores) for process_cores in cores)

    def _fork(self, process: int) -> _Worker:
        here, there = self._context.Pipe()
        child = self._context.Process(
            target=_serve,
            args=(there, self._positions, process, as_parent()),
            name=f"rank{process}",
            daemon=True,
        )
        with forking():
            child.start()
        there.close()
        return _Worker(child, here)

    def _collect(
        self, size: int, deadline: float, on_message: Callable[[int, Any], None] | None
    ) -> tuple[dict[int, Any], list[Failure], list[int]]:
        """Collect results and failures until all have answered, or time or the grace period is over."""
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        open_pipes = {self._workers[process].pipe: process for process in range(size)}
        while open_pipes:
            left_s = deadline - time.monotonic()
            ready = mpc.wait(list(open_pipes), timeout=min(max(0.0, left_s), LOOK_EVERY_S))
            if not ready and left_s <= 0:
                break
            for pipe in ready:
                assert isinstance(pipe, mpc.Connection)
                process = open_pipes[pipe]
                answer = self._answer(process)
                if isinstance(answer, _News):
                    if on_message is not None:
                        on_message(process, answer.content)
                    continue
                del open_pipes[pipe]
                if isinstance(answer, Failure):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures.append(answer)
                else:
                    results[process] = answer
        return results, failures, sorted(open_pipes.values())

    def _answer(self, process: int) -> Any:
        worker = self._workers[process]
        try:
            return pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(JOIN_S)
            code = worker.process.exitcode
            self._end(process)
            death = death_of(process, -signal.SIGKILL if code is None else code)
            return replace(death, is_stopped=worker.is_stopped)

    def _let_go(self, process: int) -> None:
        """Let a successful process leave its world: all others have answered, or never will."""
        with suppress(BrokenPipeError):  # it is dead; the next job forks it again
            self._workers[process].pipe.send_bytes(LEAVE)

    def _explain(
        self,
        failures: Sequence[Failure],
        missing: Sequence[int],
        timeout_s: float,
        where: Callable[[int, int], str],
    ) -> Exception:
        if not failures:
            stuck = ", ".join(where(process, self.position(process)) for process in missing)
            message = f"not done after {timeout_s:g} s: {stuck}"
            return WorldFailed(message, Failure(process=missing[0], time_s=0.0, text=message))
        cause = root_cause(failures)
        if cause.is_value_error:
            return ValueError(cause.text)
        message = cause.describe(where(cause.process, self.position(cause.process)))
        echoes = [f.describe("") for f in failures if f.is_echo and f.process != cause.process]
        if echoes:
            message += f"; then {echoes[0]}"
        if cause.kind is not None and missing:
            message += f"; no answer from {', '.join(where(i, self.position(i)) for i in missing)}"
        error = WorldFailed(message, cause)
        if cause.trace:
            error.add_note(f"on process {cause.process}:\n{cause.trace}")
        return error

    def _end(self, process: int) -> None:
        worker = self._workers.pop(process, None)
        if worker is None:
            return
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join(JOIN_S)
        if worker.process.is_alive():
            sys.stderr.write(f"rank {process}, process {worker.process.pid}: killed, and does not end\n")
        worker.pipe.close()


def _serve(pipe: mpc.Connection, positions: Any, process: int, parent: Parent) -> None:
    """Run a worker: execute jobs until the parent is gone."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    ended_by_default()
    torch.set_num_threads(1)
    keep_freed_memory()
    gc.freeze()  # garbage collections then skip everything that the parent has imported
    while (message := _receive(pipe)) is not None:
        try:
            order = pickle.loads(message)
        except Exception as error:
            pipe.send_bytes(pickle.dumps(failure_of(process, error)))
            return
        try:
            result = _do(order, positions, pipe)
        except Exception as error:
            pipe.send_bytes(pickle.dumps(failure_of(process, error)))  # before the failures that it causes
            _leave()
            return
        pipe.send_bytes(result)
        _receive(pipe)  # LEAVE
        _leave()
        gc.collect()
        gc.freeze()  # and imports of this job, in later jobs


def _receive(pipe: mpc.Connection) -> bytes | None:
    """The parent's next message; None if it has closed the pipe."""
    try:
        return pipe.recv_bytes()
    except EOFError:
        return None


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _do(order: _Order, positions: Any, pipe: mpc.Connection) -> bytes:
    """Join the order's world and run its job; returns the pickled result. The caller leaves the world."""

    def report(position: int) -> None:
        positions[order.process] = position

    def tell(news: object) -> None:
        if order.is_listening:
            pipe.send_bytes(pickle.dumps(_News(news)))

    if order.cores:
        os.sched_setaffinity(0, order.cores)
    join_here(order.store, rank=order.process, size=order.size, wait_s=order.wait_s)
    return packed(order.job(Place(order.process, order.size, report, tell), *order.args))
