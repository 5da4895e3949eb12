"""A linear map whose transpose is known, as one step of autograd: collectives that move or add up rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Map = Callable[[Tensor], Tensor]


def mapped(x: Tensor, there: Map, back: Map) -> Tensor:
    """`there(x)`, the gradient of which goes through `back`; `there` returns a tensor of its own."""
    y: Tensor = _Mapped.apply(x, there, back)
    return y


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None
