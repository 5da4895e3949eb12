"""A pool of forked gloo workers, reused from job to job."""

import gc
import multiprocessing
import multiprocessing.connection as mpc
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from runtime.failure import Failure, WorldFailed, death_of, failure_of, root_cause

GRACE_S = 2.0  # how long survivors may take to report after the first failure
JOIN_S = 5.0
NOTHING_DONE = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job runs.

    Args:
        process: index of this process in the job's world.
        size: of the world.
        report: tells the parent how far this process is, a position in whatever the job counts.
    """

    process: int
    size: int
    report: Callable[[int], None]


Job = Callable[..., Any]  # (place, *args) -> picklable result; itself picklable


@dataclass(slots=True)
class _Worker:
    process: ForkProcess
    pipe: mpc.Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    job: Job
    args: tuple[Any, ...]
    process: int
    size: int
    store: str
    cores: frozenset[int]
    timeout_s: float


@dataclass(slots=True)
class Pool:
    """At most `num_workers` processes; a job takes the first `size` of them as its world.

    Workers are forked from this process, which has imported torch already, so a world is
    ready in tens of milliseconds. Each job gets a process group of its own and leaves none
    behind. When a process fails, those that do not come back by themselves are killed, and
    forked anew for the next job.
    """

    num_workers: int
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _positions: Any = None
    _context: ForkContext = field(default_factory=lambda: multiprocessing.get_context("fork"))
    _folder: "tempfile.TemporaryDirectory[str]" = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="ranks-")
    )
    _num_jobs: int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"a pool needs at least one worker, got {self.num_workers}")
        torch.set_num_threads(1)  # a forked child must not inherit a thread pool that it does not have
        self._positions = self._context.RawArray("i", self.num_workers)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        job: Job,
        size: int,
        *args: Any,
        timeout_s: float = 60.0,
        where: Callable[[int, int], str] = lambda process, position: f"process {process}",
    ) -> list[Any]:
        """Run `job(place, *args)` on `size` processes; results in process order.

        Where there are at least as many cores as processes, each is pinned to one.

        Args:
            job: a function that pickles by name; so must its arguments and results.
            size: processes.
            timeout_s: for the whole job; also bounds every collective inside it.
            where: names a process and the position it reported, for error messages.

        Raises:
            ValueError: the pool is too small, or every failing process refused its input.
            WorldFailed: a process died, raised, or did not finish in time. All are ended.
        """
        if not 1 <= size <= self.num_workers:
            raise ValueError(f"the pool has {self.num_workers} workers, the job wants {size}")
        self._fork_missing(size)
        self._num_jobs += 1
        store = str(Path(self._folder.name) / f"store{self._num_jobs}")
        cores = cores_of(size)
        for process in range(size):
            self._positions[process] = NOTHING_DONE
            order = _Order(
                job=job,
                args=args,
                process=process,
                size=size,
                store=store,
                cores=cores[process],
                timeout_s=timeout_s,
            )
            self._workers[process].pipe.send_bytes(pickle.dumps(order))
        results, failures, missing = self._collect(size, time.monotonic() + timeout_s)
        Path(store).unlink(missing_ok=True)
        for process in missing:
            self._end(process)
        if not failures and not missing:
            return [results[process] for process in range(size)]
        raise self._explain(failures, missing, timeout_s, where)

    def process_ids(self) -> tuple[int, ...]:
        """Of the workers that live now, in process order."""
        return tuple(self._workers[i].process.pid or 0 for i in sorted(self._workers))

    def position(self, process: int) -> int:
        """What a process reported last."""
        return int(self._positions[process])

    def close(self) -> None:
        """End all workers."""
        for process in list(self._workers):
            self._end(process)
        self._folder.cleanup()

    def _fork_missing(self, size: int) -> None:
        for process in range(size):
            worker = self._workers.get(process)
            if worker is not None and not worker.process.is_alive():
                self._end(process)
            if process not in self._workers:
                self._workers[process] = self._fork(process)

    def _fork(self, process: int) -> _Worker:
        here, there = self._context.Pipe()
        child = self._context.Process(
            target=_serve, args=(there, self._positions, process), name=f"rank{process}", daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside threads; torch's threads are idle here.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        there.close()
        return _Worker(child, here)

    def _collect(self, size: int, deadline: float) -> tuple[dict[int, Any], list[Failure], list[int]]:
        """Results and failures until all have answered, time is up or the grace is over."""
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        open_pipes = {self._workers[process].pipe: process for process in range(size)}
        while open_pipes:
            ready = mpc.wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, mpc.Connection)
                process = open_pipes.pop(pipe)
                answer = self._answer(process)
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
            return death_of(process, -signal.SIGKILL if code is None else code)

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
        error = WorldFailed(message, cause)
        if cause.trace:
            error.add_note(f"on process {cause.process}:\n{cause.trace}")
        return error

    def _end(self, process: int) -> None:
        worker = self._workers.pop(process)
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join(JOIN_S)
        worker.pipe.close()


def cores_of(size: int) -> list[frozenset[int]]:
    """One core for each process where there are enough, else all cores for all; empty where the
    system cannot pin."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(available) < size:
        return [frozenset(available)] * size
    return [frozenset({available[process]}) for process in range(size)]


def _serve(pipe: mpc.Connection, positions: Any, process: int) -> None:
    """A worker's life: jobs until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    torch.set_num_threads(1)
    gc.freeze()  # what the parent had imported is not looked through again by every collection
    parent = os.getppid()
    while True:
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                return
        try:
            order = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception as error:
            pipe.send_bytes(pickle.dumps(failure_of(process, error)))
            continue
        pipe.send_bytes(_do(order, positions))


def _do(order: _Order, positions: Any) -> bytes:
    def report(position: int) -> None:
        positions[order.process] = position

    if order.cores:
        os.sched_setaffinity(0, order.cores)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{order.store}",
            rank=order.process,
            world_size=order.size,
            timeout=timedelta(seconds=order.timeout_s),
        )
        return pickle.dumps(order.job(Place(order.process, order.size, report), *order.args))
    except Exception as error:
        return pickle.dumps(failure_of(order.process, error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
