"""The ranks that share the weights of a stage, and differentiable sums among them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.parallel.context.group import ContextGroup, Pending
from runtime.parallel.linear_map import mapped


@dataclass(frozen=True, slots=True)
class TensorGroup(ContextGroup):
    """A tensor-parallel group, on one of its ranks; all of them have the same tokens.

    Args:
        ranks: of the plan, in the order of the grid: `member` is the index of a weight's part, not
            the rank in the process group.
    """

    gathering: ClassVar[str] = "gathering tokens"
    summing: ClassVar[str] = "adding up tokens"

    def sum(self, x: Tensor) -> None:
        """Sum over members, in place; RankError where it does not end in time or a peer is gone."""
        self._reduce(x, dist.ReduceOp.SUM, "adding up partial results")

    def largest(self, x: Tensor) -> None:
        """Elementwise maximum over members, in place; raises as `sum`."""
        self._reduce(x, dist.ReduceOp.MAX, "finding the largest score")

    def collect(self, own: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """[members] all parts, of the given shapes; raises as `sum`."""
        sizes = [math.prod(shape) for shape in shapes]
        padded = own.new_zeros(max(sizes))  # parts of a collective have one size
        padded[: own.numel()] = own.reshape(-1)
        parts = {rank: torch.empty_like(padded) for rank in sorted(self.ranks)}
        work = dist.all_gather(list(parts.values()), padded, group=self.process_group, async_op=True)
        Pending(self, work, "collecting weights").wait()
        return [
            parts[rank][:size].reshape(tuple(shape))
            for rank, size, shape in zip(self.ranks, sizes, shapes, strict=True)
        ]

    def enter(self, x: Tensor) -> Tensor:
        """x, at the start of partitioned computation; its gradient is the sum over members.

        Source: Shoeybi et al. 2019, "Megatron-LM", section 3, operator f.
        """
        return mapped(x, lambda x: x.view_as(x), self._total)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of x over members, at the end of partitioned computation; operator g of the same source."""
        return mapped(x, self._total, lambda gradient: gradient)

    def _total(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self.sum(total)
        return total

    def cut(self, x_TD: Tensor, num_pieces: int) -> list[Tensor]:
        """At most `num_pieces` pieces of a product's input, whose results are summed separately."""
        return list(x_TD.chunk(num_pieces))

    def start_sum(self, y_TD: Tensor) -> tuple[Tensor, Pending | None]:
        """Start summing a piece over members; returns this member's part, and the pending collective."""
        total = y_TD.detach().clone(memory_format=torch.contiguous_format)
        return total, self._begin(total, dist.ReduceOp.SUM, "adding up partial results")

    def start_spread(self, gradient_ND: Tensor) -> tuple[Tensor, Pending | None]:
        """The reverse, which sends a piece's gradient to all members; after a sum all have it already."""
        return gradient_ND, None

    def _reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType, what: str) -> None:
        if x.numel():  # the same number on all members
            self._begin(x, operation, what).wait()

    def _begin(self, x: Tensor, operation: dist.ReduceOp.RedOpType, what: str) -> Pending:
        work = dist.all_reduce(x, operation, group=self.process_group, async_op=True)
        return Pending(self, work, what)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """How members treat the gradients of one stage's weights.

    Args:
        group: the members.
        elsewhere: weights that another member counts in the norm: uncut ones, on all but the first.
        partial: trainable weights with a partial gradient on each member, in a fixed order.
    """

    group: TensorGroup
    elsewhere: tuple[nn.Parameter, ...]
    partial: tuple[nn.Parameter, ...]
