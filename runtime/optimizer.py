"""The optimizer step: AdamW, with a global clipping norm if asked for."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW's settings, the same on every rank and in the reference.

    `clip_norm` None: gradients are not clipped.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning rate must be > 0, got {self.learning_rate}")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clipping norm must be > 0 or None, got {self.clip_norm}")


def build_adamw(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW | None:
    """AdamW over the parameters, one at a time (`foreach` off: same arithmetic on every rank).

    None where nothing is trainable: torch refuses an empty list.
    """
    held = list(parameters)
    if not held:
        return None
    return torch.optim.AdamW(
        held,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=False,
    )


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of squares of all elements, float64 scalar (0 for none)."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu() ** 2
    return total


def clip_factor(total_norm: float, clip_norm: float) -> float:
    """What every gradient is multiplied with: min(1, clip / norm), as torch's clip_grad_norm_."""
    return min(1.0, clip_norm / (total_norm + 1e-6))
