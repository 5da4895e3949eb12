"""Weights that are gathered at once, and the ranks among which they are sharded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """What is gathered at once: stages of all replicas of an instance that hold the same layers.

    Args:
        stages: one per replica.
        ranks: of all stages, ascending; each keeps one shard of every weight.
        trained: elements of each tensor whose gradient is reduce-scattered: the stage's own trained weights
            as one flat tensor, then each tied one.
        frozen: likewise for frozen weights.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    trained: tuple[int, ...]
    frozen: tuple[int, ...]

    @property
    def gathered(self) -> tuple[int, ...]:
        """Elements of each tensor that a round gathers."""
        return (*self.trained, *self.frozen)

    def part(self, num_elements: int) -> int:
        """Return how many elements of such a tensor one rank keeps, padding included."""
        return -(-num_elements // len(self.ranks))

    def padded(self, num_elements: int) -> int:
        """Return the elements of such a tensor while it is gathered, padding included."""
        return self.part(num_elements) * len(self.ranks)
