"""Objectives of a search, by name."""

from enum import StrEnum


class Objective(StrEnum):
    """What to optimize.

    ITERATION: the shortest step. THROUGHPUT: most samples per second and rank. DOLLARS: least money per
    sample. TRAINING: least money for a whole training. GOODPUT: most useful samples per second under
    failures.
    """

    ITERATION = "iteration"
    THROUGHPUT = "throughput"
    DOLLARS = "dollars-per-sample"
    TRAINING = "dollars"
    GOODPUT = "goodput"

    @property
    def is_money(self) -> bool:
        """Whether every rank needs a price."""
        return self in (Objective.DOLLARS, Objective.TRAINING)

    @property
    def counts_ranks(self) -> bool:
        """Whether a slower plan may be better for using fewer ranks."""
        return self in (Objective.THROUGHPUT, Objective.DOLLARS, Objective.TRAINING)
