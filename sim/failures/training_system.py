"""How training systems behave when nodes join and leave: throughput by nodes, checkpoints, recoveries."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite


class Joins(StrEnum):
    """When a new node starts to take part."""

    AT_ONCE = "at once"  # with a recovery at the end of the iteration
    AT_RECOVERY = "at recovery"  # waits for the next recovery


class Restart(StrEnum):
    """What the old configuration does while a new one is set up after a failure."""

    STOPS = "stops"
    GOES_ON = (
        "goes on"  # at its old throughput, without the lost node: the assumption of a published simulator
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Checkpoints: training stops for `save_s` after `every` iterations, and rolls back after a failure.

    `first` is the number of iterations before the first checkpoint after a failure. An asynchronous
    one stops training for `save_s` only and is valid `copy_s` later; the next save waits for it, as does a
    recovery without a failure.
    """

    every: int
    save_s: float
    first: int | None = None
    copy_s: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1 or min(self.save_s, self.copy_s) < 0 or (self.first is not None and self.first < 1):
            raise ValueError(f"want a checkpoint every 1 iteration or more, saved in >= 0 s, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a training system behaves when nodes join and leave.

    Args:
        samples_per_s: [n + 1] throughput by number of nodes, 0 where it cannot run; the last value
            holds beyond the end.
        samples_per_step: global batch; an iteration takes samples_per_step / samples_per_s.
        recover_s: seconds from a change of nodes to the next iteration.
        checkpoints: None for a system that keeps its state in memory and loses only the
            aborted iteration.
        joins: when new nodes start to take part.
        restart: whether training stops during a recovery after a failure.
        redundant_share: fraction of an iteration that is redundant computation.
        idle_nodes: [n + 1] number of idle nodes, by number of nodes; empty for none.
        most_nodes: that can work together; the others are spares, whose loss costs nothing. None: no limit.
        creation_s: seconds from a node's arrival until it is usable; nodes of time 0 are usable at once.
    """

    name: str
    samples_per_s: Sequence[float]
    samples_per_step: float
    recover_s: float
    checkpoints: Checkpoints | None = None
    joins: Joins = Joins.AT_ONCE
    restart: Restart = Restart.STOPS
    redundant_share: float = 0.0
    idle_nodes: Sequence[int] = ()
    most_nodes: int | None = None
    creation_s: float = 45.0

    def __post_init__(self) -> None:
        if not self.samples_per_s or not all(isfinite(rate) and rate >= 0 for rate in self.samples_per_s):
            raise ValueError(f"{self.name}: throughput must be finite and >= 0 for every node count")
        if self.samples_per_step <= 0 or self.recover_s < 0 or self.creation_s < 0:
            raise ValueError(f"{self.name}: want a batch > 0 and times >= 0, got {self}")
        if self.most_nodes is not None and self.most_nodes < 1:
            raise ValueError(f"{self.name}: want >= 1 node that works, got {self.most_nodes}")
        if not 0 <= self.redundant_share < 1:
            raise ValueError(f"{self.name}: redundant_share must be in [0, 1), got {self.redundant_share}")

    def working(self, nodes: Collection[str]) -> set[str]:
        """The nodes that work together: the first by name where there are too many."""
        return set(nodes) if self.most_nodes is None else set(sorted(nodes)[: self.most_nodes])

    def has_room(self, num_nodes: int) -> bool:
        """Whether another node would take part."""
        return self.most_nodes is None or num_nodes < self.most_nodes

    def rate(self, num_nodes: int) -> float:
        """Samples per second on that many nodes."""
        return self.samples_per_s[min(num_nodes, len(self.samples_per_s) - 1)]

    def idle_share(self, num_nodes: int) -> float:
        """Fraction of the nodes that is idle."""
        if not self.idle_nodes or not num_nodes:
            return 0.0
        return self.idle_nodes[min(num_nodes, len(self.idle_nodes) - 1)] / num_nodes
