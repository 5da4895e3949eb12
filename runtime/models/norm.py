"""RMSNorm that keeps float64 in float64."""

import torch
from torch import Tensor, nn


class WideRMSNorm(nn.Module):
    """RMSNorm in the wider of float32 and the input's own type.

    Differs: transformers' norms round float64 inputs to float32, which turns differences of
    1e-16 into differences of 1e-8 and makes float64 parity impossible to state. For float32
    and narrower inputs the arithmetic is the same, operation by operation.

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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * wide.to(x.dtype)


def widen_norms(layer: nn.Module, norm_class: type[nn.Module], offset: float = 0.0) -> None:
    """Replace every norm of that class inside a layer, keeping names, device and size."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, norm_class):
                eps = getattr(child, "variance_epsilon", None) or getattr(child, "eps")  # noqa: B009
                weight = child.get_parameter("weight")
                with weight.device:
                    setattr(parent, name, WideRMSNorm(weight.shape[0], eps, offset))
