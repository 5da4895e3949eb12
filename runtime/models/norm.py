"""RMSNorm that keeps float64 in float64, and replacement of parts of transformers' layers by our own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class UnscaledRMSNorm(nn.Module):
    """RMSNorm without weights, in the wider of float32 and the input's own type, see `WideRMSNorm`."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _to_one(x, self.eps).to(x.dtype)


def _to_one(x: Tensor, eps: float) -> Tensor:
    """`x`, widened, divided by the root of its mean square."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class WideRMSNorm(nn.Module):
    """RMSNorm in the wider of float32 and the input's own type.

    Differs: transformers' norms round float64 inputs to float32, which turns differences of 1e-16 into
    differences of 1e-8 and makes parity in float64 impossible. For float32
    and narrower inputs the arithmetic is the same, operation by operation, except that gpt-oss, Gemma 4,
    Nemotron-H and OLMo 2 and 3 round back after their scale.

    Args:
        width: of the normalised dim.
        eps: added to the mean square.
        offset: 0.0 for Llama-like norms (scale = weight, applied after rounding back to the
            input's type); 1.0 for Gemma's (scale = 1 + weight, applied before).
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = _to_one(x, self.eps)
        if self.offset:
            return (wide * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * wide.to(x.dtype)


def replace_parts(layer: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    """Replace every part of that class in a layer by the result of `make`."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                setattr(parent, name, make(child))


def widen_norms(layer: nn.Module, norm_class: type[nn.Module], offset: float = 0.0) -> None:
    """Replace every norm of that class in a layer, keeping names, device and size."""

    def wide(norm: Any) -> nn.Module:
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        if getattr(norm, "weight", None) is None:
            return UnscaledRMSNorm(eps)
        with norm.weight.device:
            return WideRMSNorm(norm.weight.shape[0], eps, offset)

    replace_parts(layer, norm_class, wide)
