"""xIELU, an activation with two weights a layer, by torch's own operators.

Source: Huang and Schlag 2025, "Deriving Activation Functions Using Integration", equation 14.
"""

from math import expm1, log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import XIELUActivation

from runtime.models.adapter import CutKind, CutRules
from runtime.models.initialise import Fill, constant
from runtime.models.norm import replace_parts


class Xielu(nn.Module):
    """a x^2 + beta x of positive numbers, (exp(x) - 1 - x) b + beta x of others; exp of at most `eps`.

    Its two weights are a and b - beta before a softplus. `beta` and `eps` are no weights; checkpoints have
    them.

    Differs: transformers has a kernel of its own for GPUs, which this does without.
    """

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.alpha_p: nn.Parameter = activation.alpha_p
        self.alpha_n: nn.Parameter = activation.alpha_n
        for name, value in (("beta", activation._beta_scalar), ("eps", activation._eps_scalar)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        beta, eps = self.get_buffer("beta"), self.get_buffer("eps")
        positive, negative = functional.softplus(self.alpha_p), beta + functional.softplus(self.alpha_n)
        below = (torch.expm1(torch.min(x, eps.to(x.dtype))) - x) * negative
        return torch.where(x > 0, positive * x * x + beta * x, below + beta * x)


CUTS: CutRules = ((Xielu, CutKind.PARTIAL),)
# Values at which a is 0.8 and b is beta + 0.3.
FILLS: tuple[tuple[str, Fill], ...] = tuple(
    (f".{name}", constant(log(expm1(value)))) for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3))
)


def adapt(layer: nn.Module) -> None:
    """Replace transformers' activation in a layer by ours, with the same names of weights."""
    replace_parts(layer, XIELUActivation, Xielu)
