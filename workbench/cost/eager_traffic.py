"""Bytes and kernels of memory-bound operators in PyTorch without a compiler: one kernel for every call.

transformers writes a norm by the root mean square, a rotation and a gated activation as several calls, each
of which reads and writes whole tensors. PyTorch has one kernel for layer norms, GELU, ReLU and sums, so these
move what fused kernels move. Dropout is a kernel of its own there, and so is every step from stored scores
to the weights of values.
"""

from enum import StrEnum
from typing import NamedTuple

from workbench.cost.roofline import Grid, Work
from workbench.cost.traffic import (
    MASK_BYTES,
    WIDE_BYTES,
    Dropout,
    PassBytes,
    is_residual,
    pointwise_elements,
)
from workbench.model.layer import Pointwise
from workbench.model.lora import SUM
from workbench.model.transformer import XIELU, is_rms


class PointwiseKernels(StrEnum):
    """FUSED: one kernel for each operator and direction. EAGER: what transformers' modules call."""

    FUSED = "fused"
    EAGER = "eager"


class OptimizerKernels(StrEnum):
    """FUSED: one kernel updates many weights. EAGER: `torch.optim.AdamW` has one for every term of it,
    over one tensor or a list of them (`foreach`).
    """

    FUSED = "fused"
    EAGER = "eager"


EAGER_UPDATE_TENSORS = 20  # decay 2, means 3 and 2 + 3, square root, division and epsilon 2 each, weights 4


class Calls(NamedTuple):
    """The calls of an operator in one direction, by the tensors of its shape that they move.

    Args:
        own: read or written in the format of the activations.
        wide: read or written in float32.
        casts: kernels that change narrower activations to float32 or back, moving one tensor of each.
        kernels: the others.
        masks: masks of dropout read or written.
    """

    own: float = 0.0
    wide: float = 0.0
    casts: int = 0
    kernels: int = 0
    masks: int = 0

    @property
    def num_kernels(self) -> int:
        return self.kernels + self.casts

    def bytes_per_element(self, element_bytes: int) -> float:
        """Bytes moved for each element of the operator's tensor."""
        wide = max(element_bytes, WIDE_BYTES)
        casts = self.casts if element_bytes < WIDE_BYTES else 0
        masks_bytes = self.masks * MASK_BYTES
        return self.own * element_bytes + self.wide * wide + casts * (element_bytes + wide) + masks_bytes

    def then(self, other: "Calls") -> "Calls":
        """These calls and others."""
        return Calls(
            self.own + other.own,
            self.wide + other.wide,
            self.casts + other.casts,
            self.kernels + other.kernels,
            self.masks + other.masks,
        )


class EagerOperator(NamedTuple):
    """The calls of an operator: forward, for the gradient of its input, and for those of its weights."""

    forward: Calls
    backward: Calls
    weights: Calls = Calls()


# Forward: to float32, square, mean, + epsilon, 1/sqrt, product, cast, product with the weight. Backward:
# product with the weight, cast, two products, sum, three kernels over single rows, division, square's three,
# sum, cast.
_RMS = EagerOperator(
    Calls(own=2, wide=5, casts=2, kernels=6),
    Calls(own=2, wide=17, casts=2, kernels=12),
    Calls(own=4, kernels=2),
)
# Of queries and of keys: products with cosine and sine, half the vector negated, the halves joined, a sum.
_ROTARY = EagerOperator(Calls(own=10, kernels=10), Calls(own=14, kernels=14))
_GATED = EagerOperator(Calls(own=5, kernels=2), Calls(own=9, kernels=3))
# The power of a square is copied, doubled, and multiplied with the gradient.
_RELU2 = EagerOperator(Calls(own=4, kernels=2), Calls(own=10, kernels=4))
# Both of its branches for every number; signs are half a tensor. Kernels of single numbers count, too.
_XIELU = EagerOperator(Calls(own=28.5, kernels=15), Calls(own=51, kernels=23), Calls(own=8, kernels=6))
# An adapter's result times its scale, and the sum; backward, of the scale and of both gradients of the input.
_LORA_SUM = EagerOperator(Calls(own=5, kernels=2), Calls(own=5, kernels=2))
_QUICK_GELU = EagerOperator(Calls(own=7, kernels=3), Calls(own=14, kernels=5))
# GPT-2's: cube, two factors, two sums, tanh, half of the input, product.
_NEW_GELU = EagerOperator(Calls(own=18, kernels=8), Calls(own=28, kernels=11))
DROPPED = Calls(own=2, kernels=1, masks=1)  # a kernel of its own, forward and backward
_SUM = Calls(own=3, kernels=1)
_DROPPED_SUM = EagerOperator(_SUM.then(DROPPED), _SUM.then(DROPPED))

_ACTIVATIONS = {"quick_gelu": _QUICK_GELU, "gelu_new": _NEW_GELU, "relu2": _RELU2, XIELU: _XIELU}


def eager_operator(operator: Pointwise, dropout: Dropout = Dropout.NONE) -> EagerOperator | None:
    """The calls that stand for an operator; None: PyTorch has one kernel for it.

    Source: transformers 5.23, `LlamaRMSNorm`, `apply_rotary_pos_emb`, `LlamaMLP`, `QuickGELUActivation`,
    `NewGELUActivation`, `ReLUSquaredActivation`, `XIELUActivation` and `BertSelfOutput`; PEFT 0.18, `Linear`.
    """
    if is_residual(operator):
        return _DROPPED_SUM if dropout is Dropout.MASKED else None
    if operator.name.endswith("norm"):
        return _RMS if is_rms(operator) else None
    if operator.name.endswith(SUM):
        return _LORA_SUM
    if operator.name.endswith("rotary"):
        return _ROTARY
    if (called := _ACTIVATIONS.get(operator.name.rpartition(".")[2])) is not None:
        return called
    is_gated = operator.num_passes == 3 and operator.name.endswith((".silu", ".gelu", ".relu", "_tanh"))
    return _GATED if is_gated else None


def eager_bytes(
    calls: EagerOperator, operator: Pointwise, work: Work, grid: Grid, element_bytes: int
) -> PassBytes:
    """Bytes that an operator's calls move on one rank, pass by pass."""
    elements = pointwise_elements(operator, work, grid)
    return PassBytes(*(elements * each.bytes_per_element(element_bytes) for each in calls))
