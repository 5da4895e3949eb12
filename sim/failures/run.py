"""What came of training on nodes that leave and join: its iterations, and what time went into."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple


class Spent(StrEnum):
    """What wall-clock time went into."""

    EFFECTIVE = "effective"  # iterations that count
    REDUNDANT = "redundant"  # the part of them that computes a neighbour's stage again
    IDLE_NODES = "idle nodes"  # the part of them for which a node outside the grid stands by
    CHECKPOINT = "checkpoint"
    RECOVERY = "recovery"  # reconfiguration or restart
    LOST = "lost"  # iterations that were cut off, or undone by going back to a checkpoint
    WAITING = "waiting"  # too few nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration that ended, or was cut off; `samples` is 0 where it did not count in the end."""

    start_s: float
    end_s: float
    samples: float


class EqualIterations(NamedTuple):  # thousands are made a trace
    """Equal iterations: rounds that start `round_s` apart, in each `per_round` of them one after the other.

    `samples` is what each adds: 0 where it was cut off or undone.
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
        """All its iterations together."""
        return self.num_iterations * self.iteration_s

    def iterations(self) -> Iterator[Iteration]:
        """One by one."""
        for index in range(self.num_iterations):
            round_, within = divmod(index, self.per_round)
            start_s = self.start_s + round_ * self.round_s + within * self.iteration_s
            yield Iteration(start_s=start_s, end_s=start_s + self.iteration_s, samples=self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRun:
    """What came of a trace.

    Args:
        window_s: all of it, from the nodes' start.
        spent_s: by kind; together the window.
        stretches: all iterations in order of time.
        num_recoveries: completed ones.
        node_s: node-seconds that were there, used or not.
    """

    system: str
    window_s: float
    spent_s: tuple[tuple[Spent, float], ...]
    stretches: tuple[EqualIterations, ...]
    num_recoveries: int
    node_s: float

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """In order of time. Complexity: O(iterations)."""
        return tuple(each for stretch in self.stretches for each in stretch.iterations())

    @property
    def samples(self) -> float:
        return sum(stretch.num_iterations * stretch.samples for stretch in self.stretches)

    @property
    def samples_per_s(self) -> float:
        """Average over the whole window."""
        return self.samples / self.window_s

    def fraction(self, kind: Spent) -> float:
        """Of the window."""
        return dict(self.spent_s)[kind] / self.window_s

    def dollars_per_sample(self, dollars_per_node_h: float) -> float:
        """Cost of a sample that counted; infinite where none did."""
        dollars = self.node_s / 3600 * dollars_per_node_h
        return dollars / self.samples if self.samples else inf
