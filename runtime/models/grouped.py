"""Products of rows with the matrix of their group: experts of a mixture have a group of rows each.

The matrices of all groups are one parameter. Its gradient is one tensor, and each group's product is written
into its part. Where autograd indexes one matrix after the other instead, each has a gradient of the size of
the whole parameter, and all of these are added.

In bfloat16 on a GPU, PyTorch's grouped kernel computes all groups at once, and the host does not wait for the
numbers of rows. Elsewhere there is one product for each group. The kernel has not been measured here.

Source: Gale et al. 2023, "MegaBlocks", section 2 (experts as one grouped product).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Shape suffixes: R = rows, X = groups, I = features in, O = features out, A, B = any features.

KERNEL_ALIGNMENT_BYTES = 16  # of rows and of addresses, as `torch.nn.functional.grouped_mm` wants
KERNEL_CAPABILITY = (8, 0)


class Orientation(Enum):
    """Dims of a parameter with all groups' matrices."""

    OUT_IN = "[groups, out, in]"
    IN_OUT = "[groups, in, out]"


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of rows; a group may be empty.

    Args:
        ends: [X] int32 index after the last row of every group; the last one is the number of rows.
    """

    ends: Tensor

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """The rows of every group; on a GPU, the host waits for them."""
        return tuple(slice(start, end) for start, end in pairwise((0, *self.ends.tolist())))


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """The linear map of every row by the matrix of its group, and its two gradients."""

    weight: nn.Parameter
    orientation: Orientation
    groups: Groups

    @property
    def _matrices(self) -> Tensor:
        is_in_out = self.orientation is Orientation.IN_OUT
        return self.weight if is_in_out else self.weight.transpose(1, 2)

    def product(self, x_RI: Tensor) -> Tensor:
        """[R, O]."""
        return multiply(x_RI, self._matrices, self.groups)

    def input_gradient(self, gradient_RO: Tensor) -> Tensor:
        """[R, I]."""
        return multiply(gradient_RO, self._matrices.transpose(1, 2), self.groups)

    def weight_gradient(self, gradient_RO: Tensor, x_RI: Tensor) -> Tensor:
        """A tensor like the weight; zeros for groups without rows."""
        return outer(*self._factors(gradient_RO, x_RI), self.groups)

    def add_weight_gradient(self, total: Tensor, gradient_RO: Tensor, x_RI: Tensor) -> None:
        """Add the weight's gradient to a tensor like the weight."""
        add_outer(total, *self._factors(gradient_RO, x_RI), self.groups)

    def _factors(self, gradient_RO: Tensor, x_RI: Tensor) -> tuple[Tensor, Tensor]:
        return (x_RI, gradient_RO) if self.orientation is Orientation.IN_OUT else (gradient_RO, x_RI)


def grouped(x_RI: Tensor, linear: GroupedLinear) -> Tensor:
    """[R, O]; differentiable in the rows and in the weight."""
    y_RO: Tensor = _Grouped.apply(x_RI, linear.weight, linear)
    return y_RO


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight: Tensor, linear: GroupedLinear) -> Tensor:
        del weight
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None)
        ctx.linear = linear
        return linear.product(x_RI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        linear: GroupedLinear = ctx.linear
        of_x = linear.input_gradient(gradient_RO) if ctx.needs_input_grad[0] else None
        (x_RI,) = ctx.saved_tensors
        return of_x, None if x_RI is None else linear.weight_gradient(gradient_RO, x_RI), None


def multiply(x_RA: Tensor, matrices_XAB: Tensor, groups: Groups) -> Tensor:
    """[R, B] each row times the matrix of its group.

    Complexity: O(R A B).
    """
    if has_kernel(x_RA, matrices_XAB):
        return functional.grouped_mm(x_RA, matrices_XAB, offs=groups.ends)
    y_RB = x_RA.new_empty(len(x_RA), matrices_XAB.shape[2])
    for matrix_AB, rows in zip(matrices_XAB, groups.rows, strict=True):
        if rows.start < rows.stop:
            torch.mm(x_RA[rows], matrix_AB, out=y_RB[rows])
    return y_RB


def outer(a_RA: Tensor, b_RB: Tensor, groups: Groups) -> Tensor:
    """[X, A, B] sums over the rows of a group of the outer products of two rows.

    Complexity: O(R A B + X A B).
    """
    if has_kernel(a_RA, b_RB):
        return functional.grouped_mm(a_RA.t(), b_RB, offs=groups.ends)
    sums_XAB = a_RA.new_empty(len(groups.ends), a_RA.shape[1], b_RB.shape[1])
    for sum_AB, a_NA, b_NB in _by_group(sums_XAB, a_RA, b_RB, groups):
        torch.mm(a_NA.t(), b_NB, out=sum_AB)
    return sums_XAB


def add_outer(total_XAB: Tensor, a_RA: Tensor, b_RB: Tensor, groups: Groups) -> None:
    """Add `outer` of the rows to a tensor, group by group where no kernel computes all groups."""
    if has_kernel(a_RA, b_RB):
        total_XAB.add_(outer(a_RA, b_RB, groups))
        return
    for sum_AB, a_NA, b_NB in _by_group(total_XAB, a_RA, b_RB, groups):
        sum_AB.addmm_(a_NA.t(), b_NB)


def _by_group(
    sums_XAB: Tensor, a_RA: Tensor, b_RB: Tensor, groups: Groups
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for sum_AB, rows in zip(sums_XAB, groups.rows, strict=True):
        yield sum_AB, a_RA[rows], b_RB[rows]


def has_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether the grouped kernel takes the operands: bfloat16 on a GPU that has it, rows and aligned ones."""
    is_wanted = on_capable_gpu(a) and a.dtype is b.dtype is torch.bfloat16 and len(a) > 0
    return is_wanted and _is_aligned(a) and _is_aligned(b)


def on_capable_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that has the grouped kernel."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= KERNEL_CAPABILITY


def _is_aligned(x: Tensor) -> bool:
    """Whether elements of one dim are adjacent, and the address and all other strides are aligned."""
    adjacent, *others = sorted(x.stride())
    sizes_bytes = (x.data_ptr(), *(stride * x.element_size() for stride in others))
    return adjacent == 1 and not any(size % KERNEL_ALIGNMENT_BYTES for size in sizes_bytes)
