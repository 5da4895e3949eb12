"""The ranks that distribute a stage's experts, and the exchange of tokens among them that autograd knows."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from runtime.parallel.linear_map import mapped
from runtime.parallel.tensor.group import TensorGroup

# Shape suffixes: N = rows that are sent, R = rows that arrive, D = hidden width.


@dataclass(frozen=True, slots=True)
class ExpertGroup(TensorGroup):
    """A group of expert-parallel ranks as one of them sees it; each holds tokens and experts of its own.

    Args:
        ranks: of the plan, in the order in which experts are distributed: `member` is the place of this
            rank's experts, not the rank in the process group.
    """

    exchanging: ClassVar[str] = "exchanging tokens among experts"

    @property
    def senders(self) -> tuple[int, ...]:
        """Places in the order of the process group: that of what is sent and of what arrives."""
        return tuple(self.ranks.index(rank) for rank in sorted(self.ranks))


class RowCounts(NamedTuple):
    """Rows to and from every member, in the order of the process group."""

    sent: list[int]
    received: list[int]

    def back(self) -> "RowCounts":
        """Of the way back."""
        return RowCounts(self.received, self.sent)


def exchange_counts(sent: Tensor, group: ExpertGroup) -> Tensor:
    """[members, experts of this one] rows that arrive, of [members, experts of each] that are sent.

    Raises:
        RankError: it did not end in time, or a peer is gone.
    """
    received = torch.empty_like(sent)
    each = [1] * group.size
    group.exchange(received, sent.contiguous(), (each, each)).wait()
    return received


def exchange_rows(x_ND: Tensor, counts: RowCounts, group: ExpertGroup) -> Tensor:
    """[R, D] rows of all members that are for this one; the gradient goes the same way back.

    Members may send or get nothing. Fails as `exchange_counts`, forward and backward.
    """
    back = counts.back()
    return mapped(x_ND, lambda x_ND: _moved(x_ND, counts, group), lambda x_RD: _moved(x_RD, back, group))


def _moved(x_ND: Tensor, counts: RowCounts, group: ExpertGroup) -> Tensor:
    moved = x_ND.new_empty(sum(counts.received), x_ND.shape[1])
    group.exchange(moved, x_ND.contiguous(), (counts.received, counts.sent)).wait()
    return moved
