"""Gradients of a composite model: as a plan's ranks compute them, and as transformers does in one process."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import saved, whole_loss_tensor
from runtime.launch import run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from workbench.model.composites.composite import name_in_composite
from workbench.model.composites.registry import take_apart
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision

Gradients = dict[str, Tensor]  # by the names of the whole model


def gradients_of_both(name: str, plan: Plan, folder: Path, pool: Pool) -> tuple[Gradients, Gradients]:
    """(ours, transformers') from one checkpoint, which is saved in the folder; in float64."""
    parts, model = take_apart(CONFIGS[name]), saved(name, folder)
    whole_loss_tensor(name, model, plan).backward()
    theirs = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    settings = RunSettings(weights=folder, precision=Precision.FLOAT64, collect=Collect.GRADIENTS)
    ours = {
        name_in_composite(parts.modules[module], own): (
            gradient.T if own in parts.modules[module].transposed else gradient
        )
        for state in run_lowered(lower(plan), settings, pool=pool).states
        for (module, own), gradient in state.gradients.items()
    }
    return ours, theirs


def assert_same_gradients(ours: Gradients, theirs: Gradients, keys: Iterable[str]) -> None:
    """Within 1e-10 of the norm of all, for these weights."""
    scale = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for key in keys:
        assert (ours[key] - theirs[key]).norm() <= 1e-10 * scale, key
