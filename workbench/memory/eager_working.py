"""Working memory inside unmodified transformers modules in PyTorch's eager mode, by layer."""

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from workbench.float_sum import float_sum
from workbench.memory.operator_working import OperatorBytes
from workbench.memory.setting import Setting
from workbench.model.frozen import Needs
from workbench.model.layer import Layer, LayerKind, Operator, Shard
from workbench.model.trained import trainable_in


class Working(NamedTuple):
    """Working bytes of a layer, besides what its forward keeps.

    Args:
        forward: alive at once inside its forward.
        backward: inside its first backward; negative where it never holds so much at once.
        accumulating: the same where gradients of an earlier microbatch exist.
    """

    forward: int
    backward: int
    accumulating: int


def eager_working(
    layer: Layer, needs: Needs, setting: Setting, kept: Sequence[float], num_matrices: Sequence[int]
) -> Working:
    """Return the working bytes of a layer over one microbatch.

    Forward: the residual stream and the tensor it became, and one operator after the other: of attention
    its projections (twice where they are gathered or rotated) and its output; of a gated
    activation three tensors; of the head logits and log-probabilities. Where gradients run,
    most of these are kept: the stream and one tensor of the operator come on top.

    Backward: from the last operator to the first it frees what each has kept and makes the gradients of its
    weights, with gradients of the residual stream and of the operator's tensors in work. At its peak
    something has been freed or does not exist yet, so the difference from all that the forward kept and all
    gradients of the layer's weights can be negative. Where the weights have gradients of earlier
    microbatches, the gradient of one briefly exists beside the sum.

    Args:
        kept: [operators] bytes that each keeps, `eager_kept_by_operator`.
        num_matrices: [operators] as of a `GroupedLayer`.

    Complexity: O(operators).
    """
    operators = OperatorBytes(layer, needs, setting)
    forward = round(_forward_peak(operators, layer, needs, kept))
    if not needs.any:
        return Working(forward, 0, 0)
    peak = _BackwardPeak(operators, kept)
    if not needs.weight_grad:
        highest = round(peak.with_gradients((0.0,) * len(layer.operators)))
        return Working(forward, highest, highest)
    pairs = zip(layer.operators, num_matrices, strict=True)
    gradients = [count * _gradient_bytes(layer, operator, setting) for operator, count in pairs]
    so_far = list(accumulate(reversed(gradients)))[::-1]
    return Working(
        forward,
        round(peak.with_gradients(so_far) - float_sum(gradients)),
        round(peak.with_gradients(gradients)),
    )


def _gradient_bytes(layer: Layer, operator: Operator, setting: Setting) -> float:
    """Return the bytes of the gradients of its trained weights on one rank."""
    elements = (
        parameter.num_elements / (1 if parameter.shard is Shard.REPLICATED else setting.grid.tp)
        for parameter in trainable_in(layer, operator)
    )
    return float_sum(elements) * setting.element_bytes


def eager_input_working(layer: Layer, needs: Needs, setting: Setting) -> tuple[float, ...]:
    """[operators] working bytes of each one's backward where it computes no weight gradient.

    Complexity: O(operators).
    """
    operators = OperatorBytes(layer, needs, setting)
    is_kept = needs.weight_grad and not layer.has_adapters  # for W; adapters keep it scaled, beside it
    stream_gradient = 0.0 if is_kept else operators.gradient
    return tuple(own + stream_gradient for own in operators.backward())


def _forward_peak(operators: OperatorBytes, layer: Layer, needs: Needs, kept: Sequence[float]) -> float:
    current = peak = 0.0
    in_work = operators.beside_kept if needs.any else operators.forward
    for operator, own_kept in zip(layer.operators, kept, strict=True):
        current += own_kept
        peak = max(peak, current + in_work(operator))
    is_kept = needs.weight_grad and layer.kind is LayerKind.PROJECTOR
    return peak - current + (0.0 if is_kept else operators.stream)


class _BackwardPeak:
    """The peak of a backward besides what the forward kept."""

    def __init__(self, operators: OperatorBytes, kept: Sequence[float]) -> None:
        pairs = zip(accumulate(kept), operators.backward(), strict=True)
        self._held = [still_kept + in_work for still_kept, in_work in pairs]
        self._gradient, self._kept = operators.gradient, float_sum(kept)

    def with_gradients(self, gradients: Sequence[float]) -> float:
        """Return the peak; `gradients` [operators]: weights' gradients while the backward is at each."""
        peak = max(map(add, self._held, gradients), default=0.0)
        return peak + self._gradient - self._kept
