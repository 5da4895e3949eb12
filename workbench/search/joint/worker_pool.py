"""Who evaluates candidates: this process, several of this machine, or workers of a Ray cluster."""

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
        num: of them, >= 1.
    """

    address: str
    num: int


WorkerSpec = int | RayWorkers  # processes of this machine, >= 1, or others


@contextmanager
def worker_pool(space: Space, judge: Judge, spec: WorkerSpec) -> Iterator[Workers]:
    """The workers, closed behind the block; one of this machine is this process.

    Raises:
        ValueError: there are none, no cluster answers at the address, or it has not so many CPUs.
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
