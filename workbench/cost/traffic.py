"""Bytes that memory-bound training kernels move: tensors read and written, pass by pass."""

from enum import StrEnum
from typing import NamedTuple

from workbench.cost.roofline import Grid, Work, operator_tokens
from workbench.model.experts import JOIN
from workbench.model.layer import Lookup, Pointwise, Shard
from workbench.units import FLOAT32_BYTES

WIDE_BYTES = FLOAT32_BYTES  # in which softmax, loss and main gradients are computed
MASK_BYTES = 1  # of an element of a dropout mask
LOSS = "loss"


class Dropout(StrEnum):
    """NONE: off. MASKED: behind attention and MLP, and on stored scores, with a byte of mask an element."""

    NONE = "none"
    MASKED = "masked"


class LossKernel(StrEnum):
    """How the cross-entropy over the vocabulary goes over its logits.

    PARALLEL: Megatron's vocabulary-parallel loss, step by step in float32. TORCH: float32 logits,
    log-softmax and negative log-likelihood. FUSED: one kernel that leaves the gradient where the logits
    were (Hsu et al. 2024, "Liger Kernel").
    """

    PARALLEL = "parallel"
    TORCH = "torch"
    FUSED = "fused"


class PassBytes(NamedTuple):
    """Bytes a memory-bound operator moves in its forward, input gradient and weight gradient."""

    forward: float
    input_grad: float
    weight_grad: float


def lookup_bytes(operator: Lookup, work: Work, grid: Grid, element_bytes: int) -> PassBytes:
    """Bytes of a lookup: rows are read and written; the dense weight gradient is cleared and added to."""
    shards = 1 if operator.shard is Shard.REPLICATED else grid.tp
    moved = 2.0 * operator_tokens(operator, work, grid) * operator.width * element_bytes
    table = operator.num_rows * operator.width * element_bytes / shards
    return PassBytes(moved, moved, table + moved)


def pointwise_elements(operator: Pointwise, work: Work, grid: Grid) -> float:
    """Elements of a memory-bound operator's tensor on one rank."""
    width = operator.width / (1 if operator.shard is Shard.REPLICATED else grid.tp)
    return operator_tokens(operator, work, grid) * width


def pointwise_bytes(
    operator: Pointwise, work: Work, grid: Grid, element_bytes: int, dropout: Dropout = Dropout.NONE
) -> PassBytes:
    """Bytes that one fused kernel a direction moves on one rank; for a loss see `loss_bytes`.

    Of `num_passes` tensors the forward writes one. A kernel whose gradient depends on its input reads that
    and the output's gradient, and writes a gradient for every input: 2 x num_passes - 1 tensors (GELU and
    norms 3, SwiGLU 5). Norms sum the gradients of their weights in the same pass, in registers (Apex' fast
    layer norm, Transformer Engine). A rotation reads one tensor and writes one. Both inputs of a residual
    sum share the output's gradient; where the branch left the stream, its gradient and the stream's are
    summed: two read, one written. Dropout in front of a residual sum is part of its kernel; backward it
    reads gradient and mask and writes the branch's gradient. The join of experts moves rows to them and
    back, see `_join_passes`.
    """
    elements = pointwise_elements(operator, work, grid)
    tensor, passes = elements * element_bytes, operator.num_passes
    if operator.name == JOIN:
        forward, backward = _join_passes(passes - 1)
        return PassBytes(forward * tensor, backward * tensor, 0.0)
    if is_residual(operator):
        masked = dropout is Dropout.MASKED
        mask = elements * MASK_BYTES if masked else 0.0
        return PassBytes(
            passes * tensor + mask, passes * tensor + (2 * tensor + mask if masked else 0.0), 0.0
        )
    backward = passes if operator.name == "rotary" else 2 * passes - 1
    return PassBytes(passes * tensor, backward * tensor, 0.0)


def is_residual(operator: Pointwise) -> bool:
    """Whether the operator adds a branch to the stream that it left."""
    return operator.name.endswith("residual")


def is_cross_entropy(operator: Pointwise) -> bool:
    """Whether the operator is a loss over a vocabulary, which tensor parallelism cuts."""
    return operator.name == LOSS and operator.shard is Shard.COLUMN


def _join_passes(num_chosen: int) -> tuple[float, float]:
    """Tensors of [tokens, width] around a mixture of experts, forward and backward.

    Forward every token is copied to its experts' rows (one read and one written per expert), and their
    results are summed (one read per expert, one written). Backward the same, and results are read once
    more for the gradients of the experts' weights in the sum.
    """
    forward = 2 * num_chosen + num_chosen + 1
    return forward, forward + num_chosen


def loss_bytes(elements: float, element_bytes: int, kernel: LossKernel) -> PassBytes:
    """Bytes that the loss moves over logits on one rank.

    PARALLEL, as in Megatron-Core's `tensor_parallel/cross_entropy.py`: cast to float32, greatest read,
    subtracted in place, exponentials in place, their sum, division in place; backward the softmax is scaled
    in place and cast back. TORCH: cast, log-softmax (reads twice, writes), zeros and log-softmax' gradient
    (reads gradients twice and its output once, writes), cast back. FUSED: two reads and a write; the
    gradient is scaled in place.
    """
    cast = element_bytes + WIDE_BYTES if element_bytes < WIDE_BYTES else 0
    wide = max(element_bytes, WIDE_BYTES)
    match kernel:
        case LossKernel.PARALLEL:
            forward, backward = cast + 8 * wide, 2 * wide + cast
        case LossKernel.TORCH:
            forward, backward = cast + 3 * wide, 5 * wide + cast
        case LossKernel.FUSED:
            forward, backward = 3 * element_bytes, 2 * element_bytes
    return PassBytes(forward * elements, backward * elements, 0.0)
