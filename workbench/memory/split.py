"""Bytes of a backward in two passes: held during I, left by I for W, and needed by W."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from workbench.memory.setting import Setting
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, LayerKind, Lookup, Matmul, Operator, Shard

INDEX_BYTES = 8
POSITIONS = "position_embedding"


class SplitBytes(NamedTuple):
    """One layer over one microbatch, on one rank.

    Args:
        left: from I to W: what its weights read, and gradients of what they wrote.
        input_pass: most that is held of it during I: what it kept and has not given back, what it
            has left so far, and tensors in work.
        weight_pass: most that is held of it during a stage's first W: what is left, and the
            gradients that it becomes, weight by weight from the first on.
        gradients: of its weights, made by W.
        temporary: beside the gradients, where earlier microbatches have left some to add to.
    """

    left: int
    input_pass: int
    weight_pass: int
    gradients: int
    temporary: int


NO_SPLIT = SplitBytes(0, 0, 0, 0, 0)


class _Use(NamedTuple):
    """A weight's use: bytes of what it reads and of its output's gradient, bytes of its own gradient.

    Args:
        kept_by: operator that keeps what is read in the forward.
        reads: those bytes; 0 where an earlier use of the same tensor counts them.
        last: whether it is the last one to read them.
    """

    kept_by: int
    reads: float
    gradient: float
    weight: float
    last: bool


def split_bytes(
    layer: Layer, needs: Needs, setting: Setting, kept: Sequence[float], working: Sequence[float]
) -> SplitBytes:
    """The account of one layer whose weights are trained.

    W of a matmul or a table reads its input (once for neighbours that share it) and the gradient
    of its output; I computes the gradients of all other parameters, and gives everything else
    back on its way from the last operator to the first.

    Args:
        kept: [operators] bytes that each keeps from the forward.
        working: [operators] bytes that the input gradient of each has in work.

    Complexity: O(operators).
    """
    if not needs.any:
        return NO_SPLIT
    uses = dict(_uses(layer, setting, kept)) if needs.weight_grad else {}
    reads = sum(use.reads for use in uses.values())
    rest = list(kept)
    for use in uses.values():
        rest[use.kept_by] -= use.reads
    written = [uses[i].gradient if i in uses else 0.0 for i in range(len(kept))]
    behind = [sum(written) - up_to for up_to in accumulate(written)]
    held = zip(accumulate(rest), behind, working, strict=True)
    in_work = max((sum(parts) for parts in held), default=0.0)
    return SplitBytes(
        left=round(reads + sum(written)),
        input_pass=round(reads + in_work),
        weight_pass=round(_weight_pass(list(uses.values()))),
        gradients=round(sum(use.weight for use in uses.values())),
        temporary=round(_temporary(layer, setting)) if uses else 0,
    )


def _weight_pass(uses: Sequence[_Use]) -> float:
    """Uses in forward order: a tensor is given back when its last reader is done."""
    held = sum(use.reads + use.gradient for use in uses)
    most, shared = held, 0.0
    for use in uses:
        held += use.weight
        most = max(most, held)
        shared += use.reads
        held -= use.gradient
        if use.last:
            held -= shared
            shared = 0.0
    return most


def _temporary(layer: Layer, setting: Setting) -> float:
    """A matmul adds to its sum at once; a convolution's or a table's gradient is a tensor first."""
    return max(
        (
            parameter.num_elements * setting.element_bytes / setting.grid.tp
            for operator in layer.operators
            if isinstance(operator, Lookup)
            or (isinstance(operator, Matmul) and layer.kind is LayerKind.EMBED)
            for parameter in operator.parameters()
        ),
        default=0.0,
    )


def _uses(layer: Layer, setting: Setting, kept: Sequence[float]) -> Iterator[tuple[int, _Use]]:
    """Operator -> the use of its weight, in forward order."""
    operators = layer.operators
    for index, operator in enumerate(operators):
        if not isinstance(operator, Matmul | Lookup):
            continue
        following = operators[index + 1] if index + 1 < len(operators) else None
        kept_by, reads = _read(operators, index, setting, kept)
        yield (
            index,
            _Use(
                kept_by=kept_by,
                reads=reads,
                gradient=_written(layer, operator, following, setting),
                weight=sum(p.num_elements for p in operator.parameters())
                * setting.element_bytes
                / (1 if operator.shard is Shard.REPLICATED else setting.grid.tp),
                last=not (
                    isinstance(operator, Matmul)
                    and isinstance(following, Matmul)
                    and kept[index + 1] == 0
                    and following.in_features == operator.in_features
                ),
            ),
        )


def _read(
    operators: Sequence[Operator], index: int, setting: Setting, kept: Sequence[float]
) -> tuple[int, float]:
    operator, previous = operators[index], operators[index - 1] if index else None
    if isinstance(operator, Lookup):
        return index, min(kept[index], _looked_up(operator, setting) * INDEX_BYTES)
    if kept[index] == 0 and isinstance(previous, Attention):
        width = previous.num_heads * previous.head_dim * setting.element_bytes / setting.grid.tp
        return index - 1, setting.tokens(previous) * width
    return index, kept[index]


def _written(layer: Layer, operator: Matmul | Lookup, following: Operator | None, setting: Setting) -> float:
    """Bytes of the output's gradient; none of its own where it is the residual stream's, as is the
    gradient of the output of an MLP beside the attention."""
    size, tp = setting.element_bytes, setting.grid.tp
    if isinstance(operator, Lookup):
        return _looked_up(operator, setting) * operator.width * size
    if operator.shard is Shard.ROW and isinstance(following, Matmul) and following.shard is Shard.COLUMN:
        return 0.0
    cut = tp if operator.shard is Shard.COLUMN else 1
    own = setting.tokens(operator) * operator.out_features * size / cut
    if layer.kind is not LayerKind.EMBED:
        return own
    # Patches beside a class token: a view of the gradient of all of the layer's output.
    return max(own, setting.work.tokens(layer.emits) / setting.grid.cp * layer.out_width * size)


def _looked_up(operator: Lookup, setting: Setting) -> float:
    """Rows read: of a table of positions once for all items, of a table of tokens one a token."""
    tokens = setting.tokens(operator)
    if operator.name == POSITIONS:
        return min(tokens, operator.num_rows)
    return tokens if setting.looked_up is None else setting.looked_up
