"""Rows sorted by a key and back again, each as one step of autograd.

A row is copied for every one of its keys. Its gradient sums those of its copies in the order of the keys, so
that results do not vary from run to run, as atomic additions on a GPU would.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shape suffixes: N = rows, K = keys of a row, R = N x K sorted copies, D = width.


@dataclass(frozen=True, slots=True)
class RowOrder:
    """A stable order of copies of rows.

    Args:
        order: [R] index of the copy that is at a position; copy n K + k is the k-th of row n.
        position: [R] position of every copy.
        num_copies: K.
    """

    order: Tensor
    position: Tensor
    num_copies: int = 1

    def sort(self, x_ND: Tensor) -> Tensor:
        """[R, D] copies in their order."""
        x_RD: Tensor = _Moved.apply(x_ND, self.order, self.position, self.num_copies)
        return x_RD

    def restore(self, x_RD: Tensor) -> Tensor:
        """[R, D] copies row by row, from those in their order."""
        x_NKD: Tensor = _Moved.apply(x_RD, self.position, self.order, 1)
        return x_NKD


def order_by(key_R: Tensor, num_copies: int = 1) -> RowOrder:
    """The order of ascending keys, and of equal keys as they come.

    Complexity: O(R log R).
    """
    order_R = key_R.argsort(stable=True)
    index_R = torch.arange(len(order_R), device=order_R.device)
    return RowOrder(order_R, torch.empty_like(order_R).scatter_(0, order_R, index_R), num_copies)


class _Moved(torch.autograd.Function):
    """Rows at indices of their copies; `back`: the inverse of `there`."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, there_R: Tensor, back_R: Tensor, num_copies: int) -> Tensor:
        ctx.save_for_backward(back_R)
        ctx.num_copies = num_copies
        return x_ND.index_select(0, there_R if num_copies == 1 else there_R // num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (back_R,) = ctx.saved_tensors
        moved_RD = gradient_RD.index_select(0, back_R)
        if ctx.num_copies > 1:
            moved_RD = moved_RD.view(-1, ctx.num_copies, moved_RD.shape[1]).sum(1)
        return moved_RD, None, None, None
