"""Order of a batch's examples: assignment to groups, then order in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from workbench.balance.microbatches.reorder import reorder_microbatches, reorder_samples
from workbench.balance.tokens.policies import longest_first_equal_counts

BACKWARD_PER_FORWARD = 2.0


class Reordering(StrEnum):
    """What reordering balances."""

    NONE = "none"
    WITHIN = "within"  # work of data-parallel groups
    BOTH = "both"  # and pipeline bubbles from unequal microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """How examples are assigned to groups and split into microbatches.

    Args:
        microbatch: number of its examples; the last of a group may have fewer.
        num_stages: of the pipeline; the first has the encoder, the others share the language model.
    """

    reordering: Reordering = Reordering.BOTH
    microbatch: int = 1
    num_stages: int = 2

    def __post_init__(self) -> None:
        if self.microbatch < 1 or self.num_stages < 2:
            raise ValueError(
                "order: want microbatch >= 1 and num_stages >= 2, got "
                f"{self.microbatch} and {self.num_stages}"
            )


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of one example: within the encoder, and in the language model; each counts as equal work."""

    tokens_in: int
    tokens: int


def ordered(
    sizes: Sequence[Size], num_groups: int, settings: OrderSettings
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[groups][microbatches] examples in execution order: a partition of range(len(sizes)).

    Source: DistTrain, sections 5.2 and 5.3, Algorithms 1 and 2; groups get equal numbers of examples, up
    to one. Without reordering, groups are consecutive runs of the batch.

    Raises:
        ValueError: num_groups < 1.
    """
    if num_groups < 1:
        raise ValueError(f"groups of a batch: want >= 1, got {num_groups}")
    if not sizes:
        return ((),) * num_groups
    work = [size.tokens_in + size.tokens for size in sizes]
    if settings.reordering is Reordering.NONE:
        cuts = [len(sizes) * group // num_groups for group in range(num_groups + 1)]
        assigned = tuple(tuple(range(start, stop)) for start, stop in pairwise(cuts))
    else:
        assigned = reorder_samples(work, num_groups, longest_first_equal_counts)
    return tuple(_in_time(group, sizes, settings) for group in assigned)


def _in_time(
    group: tuple[int, ...], sizes: Sequence[Size], settings: OrderSettings
) -> tuple[tuple[int, ...], ...]:
    starts = range(0, len(group), settings.microbatch)
    microbatches = [group[start : start + settings.microbatch] for start in starts]
    if settings.reordering is not Reordering.BOTH or not microbatches:
        return tuple(microbatches)
    encoder = [sum(sizes[i].tokens_in for i in each) for each in microbatches]
    rest = [sum(sizes[i].tokens for i in each) / (settings.num_stages - 1) for each in microbatches]
    forward = np.column_stack([encoder, *[rest] * (settings.num_stages - 1)])
    order = reorder_microbatches(forward, BACKWARD_PER_FORWARD * forward)
    return tuple(microbatches[index] for index in order)
