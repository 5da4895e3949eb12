"""A linear map with known transpose as one step of autograd, for collectives that move or sum rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Map = Callable[[Tensor], Tensor]


def mapped(x: Tensor, there: Map, back: Map) -> Tensor:
    """`there(x)`, whose gradient is mapped by `back`; `there` returns a new tensor."""
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
