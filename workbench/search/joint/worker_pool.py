"""Where candidates are evaluated: in this process, in several local ones, or on a Ray cluster."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from workbench.search.joint.evaluate import Judge
from workbench.search.joint.move import Space
from workbench.search.joint.on_ray import OnRay
from workbench.search.joint.workers import InProcess, LocalProcesses, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Workers of a Ray cluster.

    Args:
        address: HOST:PORT of its head.
        num: number of workers, >= 1.
    """

    address: str
    num: int


WorkerSpec = int | RayWorkers  # number of local processes, >= 1, or a Ray cluster


@contextmanager
def worker_pool(space: Space, judge: Judge, spec: WorkerSpec) -> Iterator[Workers]:
    """Open the workers for the duration of the block; a single local worker is this process.

    Raises:
        ValueError: fewer than one worker, no cluster at the address, or too few CPUs in it.
    """
    num = spec.num if isinstance(spec, RayWorkers) else spec
    if num < 1:
        raise ValueError(f"joint search: want workers >= 1, got {num}; nearest: 1")
    if isinstance(spec, RayWorkers):
        with closing(OnRay(space, judge, num, spec.address)) as cluster:
            yield cluster
    elif num == 1:
        yield InProcess(space, judge)
    else:
        with closing(LocalProcesses(space, judge, num)) as processes:
            yield processes
