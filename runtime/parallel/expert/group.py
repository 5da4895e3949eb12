"""The ranks that distribute a stage's experts, and the differentiable exchange of tokens among them."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from runtime.parallel.linear_map import mapped
from runtime.parallel.tensor.group import TensorGroup

# Shape suffixes: N = rows that are sent, R = rows that arrive, D = hidden width.


@dataclass(frozen=True, slots=True)
class ExpertGroup(TensorGroup):
    """A group of expert-parallel ranks, on one of them; each has tokens and experts of its own.

    Args:
        ranks: of the plan, in the order in which experts are distributed: `member` is the index of
            this rank's experts, not the rank in the process group.
    """

    exchanging: ClassVar[str] = "exchanging tokens among experts"

    @property
    def senders(self) -> tuple[int, ...]:
        """Members in the order of the process group, in which rows are sent and arrive."""
        return tuple(self.ranks.index(rank) for rank in sorted(self.ranks))


class RowCounts(NamedTuple):
    """Numbers of rows to and from every member, in the order of the process group."""

    sent: list[int]
    received: list[int]

    def back(self) -> "RowCounts":
        """The counts of the reverse exchange."""
        return RowCounts(self.received, self.sent)


def exchange_counts(sent: Tensor, group: ExpertGroup) -> Tensor:
    """[members, experts of this one] numbers of arriving rows, from [members, experts of each] of sent ones.

    Raises:
        RankError: the exchange did not end in time, or a peer is gone.
    """
    received = torch.empty_like(sent)
    each = [1] * group.size
    group.exchange(received, sent.contiguous(), (each, each)).wait()
    return received


def exchange_rows(x_ND: Tensor, counts: RowCounts, group: ExpertGroup) -> Tensor:
    """[R, D] rows of all members for this one; the gradient takes the reverse path.

    Members may send or receive nothing. Raises as `exchange_counts`, forward and backward.
    """
    back = counts.back()
    return mapped(x_ND, lambda x_ND: _moved(x_ND, counts, group), lambda x_RD: _moved(x_RD, back, group))


def _moved(x_ND: Tensor, counts: RowCounts, group: ExpertGroup) -> Tensor:
    moved = x_ND.new_empty(sum(counts.received), x_ND.shape[1])
    group.exchange(moved, x_ND.contiguous(), (counts.received, counts.sent)).wait()
    return moved
