"""Nemotron-H: Mamba-2 mixers on packed items, and experts without gates that may read latent vectors."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.nemotron_h import modeling_nemotron_h as modeling

from runtime.models import mamba
from runtime.models.adapter import CutKind, CutRules
from runtime.models.glm import CorrectedRouter, GlmMixture
from runtime.models.initialise import Fill
from runtime.models.mixture import PlainExperts
from runtime.models.norm import replace_parts
from runtime.models.separate_experts import SeparateExperts

# Shape suffixes: S = tokens, D = hidden width, L = latent width.

REGIONS = ("mixer",)
READ, WRITTEN = "fc1_latent_proj", "fc2_latent_proj"  # submodules of a mixture
CUTS: CutRules = (
    *mamba.cuts("mixer", modeling.NemotronHMamba2Mixer, modeling.NemotronHRMSNormGated),
    (PlainExperts, CutKind.EXPERTS),
    (CorrectedRouter, CutKind.PARTIAL),
    *((f"block.mixer.{name}", CutKind.PARTIAL) for name in (READ, WRITTEN)),
)
LEAST_STEP, MOST_STEP = 0.001, 0.1
SEPARATE = SeparateExperts(own="mixer", mixture="mixer")


def _step_biases(shape: Any, generator: torch.Generator) -> Tensor:
    """What softplus makes steps of, uniform by their logarithms, in the range of published configurations."""
    low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
    step = torch.empty(*shape).uniform_(low, high, generator=generator).exp()
    return step + torch.log(-torch.expm1(-step))


FILLS: tuple[tuple[str, Fill], ...] = (
    ("mixer.dt_bias", _step_biases),
    *mamba.fills("mixer"),
)


class LatentMixture(GlmMixture):
    """Nemotron's mixture: its routed experts may read and give narrower vectors."""

    def read(self, x_SD: Tensor) -> Tensor:
        """[S, L]; the tokens themselves without latent vectors."""
        x_SL: Tensor = self.module.get_submodule(READ)(x_SD)
        return x_SL

    def written(self, y_SL: Tensor) -> Tensor:
        y_SD: Tensor = self.module.get_submodule(WRITTEN)(y_SL)
        return y_SD


def adapt(layer: nn.Module) -> None:
    """Let a layer's mixer run item by item, and its experts all at once."""
    replace_parts(layer, modeling.NemotronHExperts, PlainExperts)
    mamba.run_by_items(layer, modeling.NemotronHMamba2Mixer)
