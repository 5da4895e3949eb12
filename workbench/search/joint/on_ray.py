"""Evaluate candidates on workers of a Ray cluster, in the order of the requests.

Source: Moritz et al. 2018, "Ray: A Distributed Framework for Emerging AI Applications", OSDI (actors).
"""

import logging
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

from workbench.on_demand import OnDemand
from workbench.search.joint.evaluate import Judge, Outcome, Request
from workbench.search.joint.move import Space
from workbench.search.joint.starts import Start, Task
from workbench.search.joint.workers import Evaluator, Workers, chunks_of
from workbench.search.kept_results import code_hash

ray = OnDemand("ray")

REACH_S = 4.0  # timeout of the connection to the address
JOIN_S = 7.0  # timeout of joining the cluster
START_S = 60.0  # timeout of starting workers, and of replacing them when all died
LOOK_S = 1.0  # interval between checks for a signal
MOST_TRIES = 4  # for candidates whose workers died
_ADDRESS = re.compile(r"([^\s:/]+|\[[0-9a-fA-F:]+\]):(\d{1,5})")


class _Worker(Evaluator):
    """A worker process of the cluster."""

    def version(self) -> str:
        return code_hash()


class _Running(NamedTuple):
    """A task that a worker is executing.

    Args:
        number: of the task whose result is wanted; None: the worker is starting, or its result is no longer
            wanted.
    """

    worker: Any
    number: int | None
    is_starting: bool = False


class OnRay(Workers):
    """Workers of a Ray cluster, spread over its nodes; a worker that dies is replaced and its task repeated.

    Every node has this version of the workbench. What a search requests depends neither on the number of
    workers nor on the order of their answers.
    """

    def __init__(self, space: Space, judge: Judge, num: int, address: str) -> None:
        join(address)
        self.num = num
        try:
            self._shared = ray.put(replace(space, starts={})), ray.put(judge)
            self._actor = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_Worker)
            self._idle = self._started(num, address)
        except BaseException:
            ray.shutdown()
            raise
        self._running: dict[Any, _Running] = {}

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        yield from self._results("start", tasks)

    def outcomes(self, space: Space, requests: Sequence[Request]) -> Iterator[Outcome]:
        for outcomes in self._results("outcomes", [(space.starts, chunk) for chunk in chunks_of(requests)]):
            yield from outcomes

    def close(self) -> None:
        """Kill the workers, even if busy, and leave the cluster."""
        for worker in (*self._idle, *(each.worker for each in self._running.values())):
            ray.kill(worker)
        ray.shutdown()

    def _started(self, num: int, address: str) -> list[Any]:
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if num > cpus:
            raise ValueError(
                f"the Ray cluster at {address} has {cpus} CPUs, one for each worker; got --workers {num}; "
                f"nearest: {cpus}"
            )
        workers = [self._actor.remote(*self._shared) for _ in range(num)]
        try:
            versions = ray.get([worker.version.remote() for worker in workers], timeout=START_S)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(
                f"the Ray cluster at {address} started no {num} workers in {START_S:g} s; want free CPUs "
                f"and the workbench on every node: {reason}"
            ) from None
        if set(versions) != {code_hash()}:
            raise ValueError(f"a node of the Ray cluster at {address} has another version of the workbench")
        return workers

    def _results(self, method: str, tasks: Sequence[Any]) -> Iterator[Any]:
        """Yield results in the order of the tasks; idle workers take the next waiting task."""
        waiting, tries = deque(range(len(tasks))), [0] * len(tasks)
        results: dict[int, Any] = {}
        try:
            for number in range(len(tasks)):
                while number not in results:
                    while self._idle and waiting:
                        index, worker = waiting.popleft(), self._idle.pop()
                        tries[index] += 1
                        self._running[getattr(worker, method).remote(tasks[index])] = _Running(worker, index)
                    lost = self._collect(results)
                    for task in lost:
                        if tries[task] == MOST_TRIES:
                            raise RuntimeError(f"candidates ended {MOST_TRIES} workers that tried them")
                    waiting.extendleft(reversed(lost))
                yield results.pop(number)
        finally:
            self._running = {ref: each._replace(number=None) for ref, each in self._running.items()}

    def _collect(self, results: dict[int, Any]) -> list[int]:
        """Store the results of finished tasks; return the tasks of workers that died."""
        lost = []
        for ref in self._wait_for_ended():
            worker, number, _ = self._running.pop(ref)
            try:
                result = ray.get(ref)
            except ray.exceptions.RayActorError:
                replacement = self._actor.remote(*self._shared)
                self._running[replacement.version.remote()] = _Running(replacement, None, is_starting=True)
                lost += [] if number is None else [number]
                continue
            self._idle.append(worker)
            if number is not None:
                results[number] = result
        return lost

    def _wait_for_ended(self) -> list[Any]:
        """Wait for a task to end; RuntimeError if all workers died and none could be replaced."""
        began_s = monotonic()
        while True:
            ended, _ = ray.wait(list(self._running), num_returns=1, timeout=LOOK_S)
            if ended:
                return list(ended)
            if all(each.is_starting for each in self._running.values()) and monotonic() - began_s > START_S:
                raise RuntimeError(f"all workers of the Ray cluster died, and none came in {START_S:g} s")


def join(address: str) -> None:
    """Connect this process to a Ray cluster that runs on this machine, among others.

    Args:
        address: HOST:PORT of the cluster's head, as `ray start` prints it.

    Raises:
        ValueError: the address is malformed, or no cluster accepts this process within `REACH_S` and
            `JOIN_S` seconds.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(
            f"--ray: want HOST:PORT of a cluster's head, got {address!r}; nearest: 127.0.0.1:6379"
        )
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), REACH_S).close()
    except OSError as error:
        raise ValueError(f"--ray {address}: nobody answers there: {error}") from None
    failed: list[BaseException] = []
    joining = threading.Thread(target=_join, args=(ray.init, address, failed), daemon=True)
    joining.start()
    joining.join(JOIN_S)
    if joining.is_alive() or failed:
        reason = str(failed[0]).strip().splitlines()[0] if failed else f"it says nothing for {JOIN_S:g} s"
        raise ValueError(f"--ray {address}: what answers there takes in nobody of this machine: {reason}")


def _join(init: Callable[..., object], address: str, failed: list[BaseException]) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)  # signals are the command's, which Ray is told of
    try:
        init(address=address, log_to_driver=False, configure_logging=False)
    except BaseException as error:  # told by the thread that waits
        failed.append(error)
