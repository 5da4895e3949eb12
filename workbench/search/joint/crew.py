"""Who evaluates candidates: this process, several of this machine, or workers of a Ray cluster."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from workbench.search.joint.evaluate import Judge
from workbench.search.joint.move import Space
from workbench.search.joint.on_ray import OnRay
from workbench.search.joint.workers import Here, Several, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Workers of a Ray cluster.

    Args:
        address: HOST:PORT of its head.
        num: of them, >= 1.
    """

    address: str
    num: int


Crew = int | RayWorkers  # processes of this machine, >= 1, or others


@contextmanager
def opened(space: Space, judge: Judge, crew: Crew) -> Iterator[Workers]:
    """The workers, closed behind the block; one of this machine is this process.

    Raises:
        ValueError: there are none, no cluster answers at the address, or it has not so many CPUs.
    """
    num = crew.num if isinstance(crew, RayWorkers) else crew
    if num < 1:
        raise ValueError(f"joint search: want workers >= 1, got {num}; nearest: 1")
    if isinstance(crew, RayWorkers):
        with closing(OnRay(space, judge, num, crew.address)) as cluster:
            yield cluster
    elif num == 1:
        yield Here(space, judge)
    else:
        with closing(Several(space, judge, num)) as several:
            yield several
