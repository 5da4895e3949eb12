"""Experts of gpt-oss: with biases, gate and up alternating, and a clamped activation."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from runtime.models.adapter import CutKind, CutRules
from runtime.models.grouped import Groups, Orientation
from runtime.models.initialise import Fill, normal
from runtime.models.mixture import Experts, MixtralMixture
from runtime.models.norm import replace_parts

# Shape suffixes: S, T = tokens, R = rows, one per token and expert of it, X = experts, K = those of a token,
# D = hidden width, O = features out.


class ClampedExperts(Experts):
    """Experts whose products have biases: (up + 1) x gate x sigmoid(alpha x gate), both clamped first."""

    alternates: ClassVar[bool] = True

    def __init__(self, experts: Any) -> None:
        super().__init__(experts, Orientation.IN_OUT)
        self.gate_up_proj_bias: nn.Parameter = experts.gate_up_proj_bias
        self.down_proj_bias: nn.Parameter = experts.down_proj_bias
        self.alpha: float = experts.alpha
        self.limit: float = experts.limit

    def forward(self, x_RD: Tensor, groups: Groups) -> Tensor:
        """[R, D] results of rows that are sorted by expert."""
        index_R = _expert_of_row(groups, len(x_RD))
        inner_RO = self._mapped(x_RD, self.entering, groups).add_(self.gate_up_proj_bias[index_R])
        y_RD = self._mapped(self.gated(inner_RO), self.down_proj, groups)
        return y_RD.add_(self.down_proj_bias[index_R]) if self.adds_bias else y_RD

    def gated(self, halves: Tensor) -> Tensor:
        gate = halves[..., ::2].clamp(max=self.limit)
        up = halves[..., 1::2].clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * (gate * self.alpha).sigmoid())


def _expert_of_row(groups: Groups, num_rows: int) -> Tensor:
    """[R] index of every row's expert on this rank."""
    return torch.searchsorted(groups.ends, torch.arange(num_rows, device=groups.ends.device), right=True)


class GptOssMixture(MixtralMixture):
    """Results are multiplied by the softmax of the scores of a token's experts alone."""

    router = "router"

    def returned(self, y_TD: Tensor, like: Tensor) -> Any:
        del like
        return self.module.total(y_TD)[None], None


CUTS: CutRules = (
    (ClampedExperts, CutKind.EXPERTS),
    (gpt_oss.GptOssTopKRouter, CutKind.PARTIAL),
    (gpt_oss.GptOssAttention, CutKind.HEADS),  # its sinks
)


# Differs: transformers draws the router's bias with the configuration's standard deviation, not its default.
FILLS: tuple[tuple[str, Fill], ...] = ((".router.bias", normal(0.02)),)


def adapt(layer: nn.Module) -> None:
    """Replace transformers' experts in a layer by these, with the same names of weights."""
    replace_parts(layer, gpt_oss.GptOssExperts, ClampedExperts)
    for module in layer.modules():
        if isinstance(module, gpt_oss.GptOssMLP):
            module.total = nn.Identity()  # where ranks with parts of experts sum
