"""What PyTorch's autocast adds: weights stay in float32, and every forward casts them for its products.

Norms, softmax and losses are in float32, and so is the stream of residual sums, as tables and norms give
float32: whatever a product reads behind a norm is cast. The rest has two bytes.
"""

from enum import StrEnum

from workbench.cost.eager_traffic import DROPPED, Calls, EagerOperator, PointwiseKernels, eager_operator
from workbench.cost.products import CastKernels
from workbench.cost.traffic import WIDE_BYTES, Dropout, is_residual
from workbench.model.layer import Matmul, Operator, Pointwise


class Autocast(StrEnum):
    """OFF: weights and activations have one format. ON: as `torch.autocast` runs float32 weights."""

    OFF = "off"
    ON = "on"


# One kernel each: the norm's result is written as the product reads it; the gradient of a branch leaves the
# stream as its product reads it.
_WEIGHTS = Calls(kernels=1)  # of a norm: sums what the pass for its input has read
_FUSED_NORM = EagerOperator(Calls(own=1, wide=1, kernels=1), Calls(own=1, wide=2, kernels=1), _WEIGHTS)
_FUSED_SUM = EagerOperator(Calls(own=1, wide=2, kernels=1), Calls(own=1, wide=3, kernels=1))
_NORM = EagerOperator(Calls(wide=2, casts=1, kernels=1), Calls(wide=3, casts=1, kernels=1), _WEIGHTS)
_SUM = EagerOperator(Calls(own=1, wide=2, kernels=1), Calls(wide=3, casts=1, kernels=1))
_FUSED_MASK = Calls(masks=1)
_CAST = Calls(casts=1)  # of what a product reads, and of its gradient
NO_CASTS = CastKernels(0, 0)


def calls_of(
    operator: Pointwise, pointwise: PointwiseKernels, dropout: Dropout, autocast: Autocast
) -> EagerOperator | None:
    """The calls that stand for a memory-bound operator; None: it is one kernel over one format."""
    is_cast = autocast is Autocast.ON
    if is_cast and (calls := _autocast_operator(operator, pointwise, dropout)):
        return calls
    return None if pointwise is PointwiseKernels.FUSED else eager_operator(operator, dropout)


def _autocast_operator(
    operator: Pointwise, pointwise: PointwiseKernels, dropout: Dropout
) -> EagerOperator | None:
    """The calls that stand for a norm or a residual sum under autocast; None: it is like any other.

    Source: PyTorch's list of operators that autocast runs in float32, and how its gradients are cast back.
    """
    is_eager, is_dropped = pointwise is PointwiseKernels.EAGER, dropout is Dropout.MASKED
    if is_residual(operator):
        calls, drop = (_SUM, DROPPED) if is_eager else (_FUSED_SUM, _FUSED_MASK)
        return EagerOperator(calls.forward.then(drop), calls.backward.then(drop)) if is_dropped else calls
    if not operator.name.endswith("norm"):
        return None
    if not is_eager:
        return _FUSED_NORM
    steps = eager_operator(operator)
    if steps is None:
        return _NORM
    forward, backward, weights = map(_widened, steps)
    return EagerOperator(forward.then(_CAST), backward.then(_CAST), weights)


def _widened(calls: Calls) -> Calls:
    """The calls over a stream in float32, where none casts."""
    return calls._replace(own=0.0, wide=calls.own + calls.wide, casts=0)


def autocast_kernels(operator: Operator, calls: EagerOperator | None) -> CastKernels:
    """Kernels that autocast itself launches: casts of weights and their gradients, and of activations."""
    if isinstance(operator, Matmul):
        return CastKernels(1 + operator.bias, 1 + operator.bias)
    return CastKernels(calls.forward.casts, calls.backward.casts) if calls else NO_CASTS


def weight_cast_bytes(num_elements: float, element_bytes: int) -> float:
    """Bytes of casting weights for a product, or their gradients back."""
    return num_elements * (WIDE_BYTES + element_bytes)
