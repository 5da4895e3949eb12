"""Candidates evaluated by workers of a Ray cluster, in the order in which they were asked for.

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
from workbench.search.joint.evaluate import Asked, Judge, Outcome, evaluated
from workbench.search.joint.move import Space
from workbench.search.joint.starts import Start, Task, start_of
from workbench.search.joint.workers import Workers, chunks_of
from workbench.search.kept_results import code_hash

ray = OnDemand("ray")

REACH_S = 4.0  # for a connection to the address
JOIN_S = 7.0  # for the cluster behind it to take this process in
START_S = 60.0  # for workers to start, and with none left, for another to come
LOOK_S = 1.0  # between two looks for a signal
MOST_TRIES = 4  # of candidates whose workers died
_ADDRESS = re.compile(r"([^\s:/]+|\[[0-9a-fA-F:]+\]):(\d{1,5})")


class _Worker:
    """What a worker process of the cluster holds: the search's job, and by that all prices it has found."""

    def __init__(self, space: Space, judge: Judge) -> None:
        self._space, self._judge = space, judge

    def version(self) -> str:
        return code_hash()

    def start(self, task: Task) -> Start:
        return start_of(task, self._space.cost, self._judge)

    def outcomes(self, task: tuple[dict[str, Any], Sequence[Asked]]) -> list[Outcome]:
        starts, asked = task
        here = replace(self._space, starts=starts)
        return [evaluated(here, self._judge, each) for each in asked]


class _Running(NamedTuple):
    """What a worker does.

    Args:
        number: of the task whose result is wanted; None: it starts, or does what nobody waits for any more.
    """

    worker: Any
    number: int | None
    is_starting: bool = False


class OnRay(Workers):
    """Workers of a Ray cluster, spread over its nodes; one that dies is replaced, what it had is done again.

    Every node has this version of the workbench. What a search asks of them does not depend on how many there
    are, nor on who answers first.
    """

    def __init__(self, space: Space, judge: Judge, num: int, address: str) -> None:
        joined(address)
        self.num = num
        try:
            self._held = ray.put(replace(space, starts={})), ray.put(judge)
            self._actor = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_Worker)
            self._idle = self._started(num, address)
        except BaseException:
            ray.shutdown()
            raise
        self._running: dict[Any, _Running] = {}

    def starts(self, tasks: Sequence[Task]) -> Iterator[Start]:
        yield from self._each("start", tasks)

    def outcomes(self, space: Space, asked: Sequence[Asked]) -> Iterator[Outcome]:
        for found in self._each("outcomes", [(space.starts, chunk) for chunk in chunks_of(asked)]):
            yield from found

    def close(self) -> None:
        """End the workers, whatever they do, and leave the cluster."""
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
        found = [self._actor.remote(*self._held) for _ in range(num)]
        try:
            versions = ray.get([worker.version.remote() for worker in found], timeout=START_S)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(
                f"the Ray cluster at {address} started no {num} workers in {START_S:g} s; want free CPUs "
                f"and the workbench on every node: {reason}"
            ) from None
        if set(versions) != {code_hash()}:
            raise ValueError(f"a node of the Ray cluster at {address} has another version of the workbench")
        return found

    def _each(self, method: str, tasks: Sequence[Any]) -> Iterator[Any]:
        """Results in the order of the tasks; a task is given to a worker when that has nothing else to do."""
        waiting, tries = deque(range(len(tasks))), [0] * len(tasks)
        results: dict[int, Any] = {}
        try:
            for number in range(len(tasks)):
                while number not in results:
                    while self._idle and waiting:
                        given, worker = waiting.popleft(), self._idle.pop()
                        tries[given] += 1
                        self._running[getattr(worker, method).remote(tasks[given])] = _Running(worker, given)
                    lost = self._collected(results)
                    for task in lost:
                        if tries[task] == MOST_TRIES:
                            raise RuntimeError(f"candidates ended {MOST_TRIES} workers that tried them")
                    waiting.extendleft(reversed(lost))
                yield results.pop(number)
        finally:
            self._running = {ref: each._replace(number=None) for ref, each in self._running.items()}

    def _collected(self, results: dict[int, Any]) -> list[int]:
        """Take in what has ended; the tasks of workers that died are returned."""
        lost = []
        for ref in self._ended():
            worker, number, _ = self._running.pop(ref)
            try:
                result = ray.get(ref)
            except ray.exceptions.RayActorError:
                another = self._actor.remote(*self._held)
                self._running[another.version.remote()] = _Running(another, None, is_starting=True)
                lost += [] if number is None else [number]
                continue
            self._idle.append(worker)
            if number is not None:
                results[number] = result
        return lost

    def _ended(self) -> list[Any]:
        """RuntimeError where all workers died and no other comes."""
        began_s = monotonic()
        while True:
            ended, _ = ray.wait(list(self._running), num_returns=1, timeout=LOOK_S)
            if ended:
                return list(ended)
            if all(each.is_starting for each in self._running.values()) and monotonic() - began_s > START_S:
                raise RuntimeError(f"all workers of the Ray cluster died, and none came in {START_S:g} s")


def joined(address: str) -> None:
    """Make this process part of a Ray cluster, on one of whose nodes it runs.

    Args:
        address: HOST:PORT of the cluster's head, as `ray start` prints it.

    Raises:
        ValueError: it is no such address, or no cluster answers there in `REACH_S` and `JOIN_S` seconds.
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
