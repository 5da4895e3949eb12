"""Aria's mixture of experts: weights as [experts, in, out], and shares of the chosen experts alone."""

from torch import nn
from transformers.models.aria import modeling_aria as aria

from runtime.models.adapter import CutKind, CutRules
from runtime.models.glm import GlmMixture
from runtime.models.grouped import Orientation
from runtime.models.mixture import Experts
from runtime.models.norm import replace_parts

# Shape suffixes: S = tokens, K = experts of a token, D = hidden width.


class AriaMixture(GlmMixture):
    """Results are multiplied by the softmax of the scores of a token's experts alone."""

    router = "router"


RESPELLED = (("experts.gate_up_proj", "experts.fc1.weight"), ("experts.down_proj", "experts.fc2.weight"))
CUTS: CutRules = ((Experts, CutKind.EXPERTS), (aria.AriaTextTopKRouter, CutKind.PARTIAL))


def adapt(layer: nn.Module) -> None:
    """Replace transformers' experts in a layer by ours, with the same names of weights."""
    replace_parts(layer, aria.AriaExperts, lambda experts: Experts(experts, Orientation.IN_OUT))
