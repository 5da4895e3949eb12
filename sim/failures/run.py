"""Result of training on nodes that leave and join: its iterations, and how its time was spent."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from workbench.float_sum import float_sum


class Spent(StrEnum):
    """What wall-clock time was spent on."""

    EFFECTIVE = "effective"  # iterations that count
    REDUNDANT = "redundant"  # the part of them that recomputes a neighbour's stage
    IDLE_NODES = "idle nodes"  # the part of them during which a node outside the grid is idle
    CHECKPOINT = "checkpoint"
    RECOVERY = "recovery"  # reconfiguration or restart
    LOST = "lost"  # iterations that were aborted, or undone by a rollback to a checkpoint
    WAITING = "waiting"  # too few nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration, completed or aborted; `samples` is 0 where it does not count in the end."""

    start_s: float
    end_s: float
    samples: float


class EqualIterations(NamedTuple):  # a tuple, as there are thousands per trace
    """Equal iterations: rounds that start `round_s` apart, each of `per_round` iterations back to back.

    `samples` is what each contributes: 0 where it was aborted or undone.
    """

    start_s: float
    iteration_s: float
    samples: float
    num_nodes: int
    per_round: int = 1
    num_rounds: int = 1
    round_s: float = 0.0

    @property
    def num_iterations(self) -> int:
        return self.per_round * self.num_rounds

    @property
    def lasted_s(self) -> float:
        """Total seconds of its iterations."""
        return self.num_iterations * self.iteration_s

    def iterations(self) -> Iterator[Iteration]:
        """Yield the iterations one by one."""
        for index in range(self.num_iterations):
            round_, within = divmod(index, self.per_round)
            start_s = self.start_s + round_ * self.round_s + within * self.iteration_s
            yield Iteration(start_s=start_s, end_s=start_s + self.iteration_s, samples=self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRun:
    """Result of a simulation on a trace of nodes.

    Args:
        window_s: seconds that were simulated.
        spent_s: seconds by kind; they add up to the window.
        stretches: all iterations, in order of time.
        num_recoveries: number of completed recoveries.
        node_s: node-seconds available, used or not.
    """

    system: str
    window_s: float
    spent_s: tuple[tuple[Spent, float], ...]
    stretches: tuple[EqualIterations, ...]
    num_recoveries: int
    node_s: float

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """All iterations in order of time. Complexity: O(iterations)."""
        return tuple(iteration for stretch in self.stretches for iteration in stretch.iterations())

    @property
    def samples(self) -> float:
        return float_sum(stretch.num_iterations * stretch.samples for stretch in self.stretches)

    @property
    def samples_per_s(self) -> float:
        """Throughput averaged over the whole window."""
        return self.samples / self.window_s

    def fraction(self, kind: Spent) -> float:
        """Fraction of the window that was spent on a kind."""
        return dict(self.spent_s)[kind] / self.window_s

    def dollars_per_sample(self, dollars_per_node_h: float) -> float:
        """Cost per sample that counts; infinite where none does."""
        dollars = self.node_s / 3600 * dollars_per_node_h
        return dollars / self.samples if self.samples else inf
