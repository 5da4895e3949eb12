"""What is best, by name."""

from enum import StrEnum


class Objective(StrEnum):
    """What is best.

    ITERATION: the shortest step. THROUGHPUT: most samples per second and rank. DOLLARS: the least money a
    sample; TRAINING: the least for a whole training. GOODPUT: most samples per second that count, where
    machines fail.
    """

    ITERATION = "iteration"
    THROUGHPUT = "throughput"
    DOLLARS = "dollars-per-sample"
    TRAINING = "dollars"
    GOODPUT = "goodput"

    @property
    def is_money(self) -> bool:
        """Whether every rank must have a price."""
        return self in (Objective.DOLLARS, Objective.TRAINING)

    @property
    def counts_ranks(self) -> bool:
        """Whether a plan that is slower may be better for its fewer ranks."""
        return self in (Objective.THROUGHPUT, Objective.DOLLARS, Objective.TRAINING)
