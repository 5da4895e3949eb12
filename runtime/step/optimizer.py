"""The optimizer step of AdamW, with optional clipping by the global norm and learning-rate schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.job.run_options import LEARNING_RATE, WEIGHT_DECAY, RunOptions


class Update(StrEnum):
    """SINGLE: tensor by tensor. FUSED: GPU kernels for many tensors at once."""

    SINGLE = "single"
    FUSED = "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """Linear warm-up to the learning rate, then a half cosine down to a fraction of it, then constant.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.

    Args:
        warmup_steps: of the warm-up; the first step has 1 / warmup_steps of the rate. 0: none.
        decay_steps: of the decay; None: none.
        floor: fraction of the rate at its end.
    """

    warmup_steps: int
    decay_steps: int | None
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("warmup_steps", 0), ("decay_steps", 1)):
            steps = getattr(self, name)
            if steps is not None and steps < least:
                raise ValueError(f"{name} must be >= {least}, got {steps}")
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"floor must be 0 to 1 times the learning rate, got {self.floor}")

    def factor(self, step: int) -> float:
        """Factor of the learning rate in a step, counted from 0. O(1)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return 1.0
        part = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * part))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The optimizer's settings, the same on every rank and in the reference.

    `clip_norm` None: no clipping. `schedule` None: a constant rate.
    """

    learning_rate: float = LEARNING_RATE
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = WEIGHT_DECAY
    clip_norm: float | None = None
    schedule: RateSchedule | None = None

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning rate must be > 0 and finite, got {self.learning_rate}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight decay must be >= 0 and finite, got {self.weight_decay}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clipping norm must be > 0 and finite, or None, got {self.clip_norm}")


def optimizer_of(options: RunOptions) -> OptimizerSettings:
    """The settings that a run's options say; ValueError for one out of bounds."""
    is_constant = options.rate_warmup == 0 and options.rate_decay is None
    schedule = RateSchedule(warmup_steps=options.rate_warmup, decay_steps=options.rate_decay)
    return OptimizerSettings(
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        schedule=None if is_constant else schedule,
    )


def build_adamw(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings, *, follows: bool = True
) -> torch.optim.AdamW | None:
    """AdamW over the parameters, the same arithmetic on every rank.

    Fused on GPUs: a few kernels for all tensors instead of hundreds of small ones. Tensor by tensor on a CPU.
    None where nothing is trainable, as torch refuses an empty list. `follows`: whether it follows the
    settings' schedule of rates by itself.
    """
    trained = list(parameters)
    if not trained:
        return None
    adamw = torch.optim.AdamW(
        trained,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=False,
        fused=True if all(parameter.is_cuda for parameter in trained) else None,
    )
    if follows and settings.schedule is not None:
        follow_rate(adamw, settings, settings.schedule)
    return adamw


def follow_rate(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, schedule: RateSchedule
) -> None:
    """Before every step, set the rate of that step."""
    optimizer.register_step_pre_hook(partial(_set_rate, settings, schedule))


def update_of(adamw: torch.optim.Optimizer) -> Update:
    """How it updates its tensors."""
    return Update.FUSED if adamw.defaults["fused"] else Update.SINGLE


def step_count(adamw: torch.optim.Optimizer, parameter: Tensor, steps: int) -> Tensor:
    """AdamW's step counter of a tensor after `steps` updates; on the GPU for fused kernels."""
    device = parameter.device if update_of(adamw) is Update.FUSED else "cpu"
    return torch.tensor(float(steps), device=device)


def _set_rate(
    settings: OptimizerSettings, schedule: RateSchedule, adamw: torch.optim.Optimizer, *_: Any
) -> None:
    """Set the rate by AdamW's own step counters, so that restored state continues its schedule."""
    counts = [state["step"] for state in adamw.state.values() if "step" in state]
    num_steps = int(torch.stack(counts).max()) if counts else 0  # one wait for a GPU, not one per tensor
    for group in adamw.param_groups:
        group["lr"] = settings.learning_rate * schedule.factor(num_steps)


CLIP_EPSILON = 1e-6  # as torch's clip_grad_norm_


# Gradients are widened to float64 for the norm, so a piece takes 8 bytes an element: in a core's cache, or as
# many as few kernels read.
NORM_ELEMENTS, NORM_ELEMENTS_ON_GPU = 2**20, 2**24


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, a float64 scalar on the gradients' device (0 for none)."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_elements = NORM_ELEMENTS if device.type == "cpu" else NORM_ELEMENTS_ON_GPU
    for gradient in gradients:
        for piece in gradient.reshape(-1).split(num_elements):
            total += torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2
    return total


def clip_factor(squared: Tensor, clip_norm: float) -> float | Tensor:
    """Factor of every gradient: min(1, clip / norm), as in torch's clip_grad_norm_.

    Args:
        squared: square of the norm, a scalar. On a GPU the factor stays there, so that the host does not
            wait.
    """
    if squared.device.type == "cpu":
        return min(1.0, clip_norm / (float(squared) ** 0.5 + CLIP_EPSILON))
    return (clip_norm / (squared.sqrt() + CLIP_EPSILON)).clamp(max=1.0)
