"""Memory of a backward split in two passes: held during I, left by I for W, and needed by W."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from workbench.cost.expert_parallel import FOR_ALL
from workbench.float_sum import float_sum
from workbench.memory.adapters import inner_bytes
from workbench.memory.setting import INDEX_BYTES, Setting
from workbench.model.experts import ROUTER, SHARED, is_of_expert
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, LayerKind, Lookup, Matmul, Operator, Recurrence, Shard
from workbench.model.trained import has_trainable, trainable_in

POSITIONS = "position_embedding"


class SplitBytes(NamedTuple):
    """What one layer needs over one microbatch, on one rank.

    Args:
        left: from I to W: what its weights read, and gradients of what they wrote.
        input_pass: peak of its tensors during I: what it kept and has not freed, what it
            has left so far, and tensors in work.
        weight_pass: peak of its tensors during a stage's first W: what is left, and the
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
    """A weight's use in the forward, as its W sees it.

    Args:
        kept_by: operator that keeps what is read in the forward.
        reads: bytes of that; 0 where an earlier use of the same tensor counts them.
        gradient: bytes of its output's gradient.
        weight: bytes of its own gradient.
        last: whether it is the last use to read the tensor.
    """

    kept_by: int
    reads: float
    gradient: float
    weight: float
    last: bool


def split_bytes(
    layer: Layer,
    needs: Needs,
    setting: Setting,
    kept: Sequence[float],
    working: Sequence[float],
    num_matrices: Sequence[int],
) -> SplitBytes:
    """Return the account of one layer whose weights are trained.

    W of a matmul or a table reads its input (once for adjacent ones that share it) and the gradient of its
    output; I computes the gradients of all other parameters, and frees everything else on its way from the
    last operator to the first.

    Args:
        kept: [operators] bytes that each keeps from the forward.
        working: [operators] bytes that the input gradient of each has in work.
        num_matrices: [operators] as of a `GroupedLayer`.

    Complexity: O(operators).
    """
    if not needs.any:
        return NO_SPLIT
    uses = dict(_uses(layer, setting, kept, num_matrices)) if needs.weight_grad else {}
    reads = float_sum(use.reads for use in uses.values())
    freed_by_i = list(kept)
    for use in uses.values():
        freed_by_i[use.kept_by] -= use.reads
    written = [uses[i].gradient if i in uses else 0.0 for i in range(len(kept))]
    later = [float_sum(written) - up_to for up_to in accumulate(written)]
    tensors = zip(accumulate(freed_by_i), later, working, strict=True)
    in_work = max((float_sum(parts) for parts in tensors), default=0.0)
    return SplitBytes(
        left=round(reads + float_sum(written)),
        input_pass=round(reads + in_work),
        weight_pass=round(_weight_pass(list(uses.values())) + (_turned(layer, setting) if uses else 0.0)),
        gradients=round(float_sum(use.weight for use in uses.values())),
        temporary=round(_temporary(layer, setting)) if uses else 0,
    )


def _weight_pass(uses: Sequence[_Use]) -> float:
    """Return the peak over uses in forward order; a tensor is freed when its last reader is done."""
    current = float_sum(use.reads + use.gradient for use in uses)
    peak, shared = current, 0.0
    for use in uses:
        current += use.weight
        peak = max(peak, current)
        shared += use.reads
        current -= use.gradient
        if use.last:
            current -= shared
            shared = 0.0
    return peak


def _turned(layer: Layer, setting: Setting) -> float:
    """Return the gradient of a rule's channels, which W turns: a convolution has it channel by channel."""
    rules = (operator for operator in layer.operators if isinstance(operator, Recurrence))
    elements = float_sum(setting.tokens(rule) * rule.width for rule in rules)
    return elements * setting.element_bytes / setting.grid.tp


def _temporary(layer: Layer, setting: Setting) -> float:
    """Return the largest gradient that is a tensor before it is added: a convolution's or a table's."""
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


def _uses(
    layer: Layer, setting: Setting, kept: Sequence[float], num_matrices: Sequence[int]
) -> Iterator[tuple[int, _Use]]:
    """Yield each operator with weights in W and its use, in forward order; a router's gradients are I's."""
    operators = layer.operators
    for index, operator in enumerate(operators):
        if not isinstance(operator, Matmul | Lookup) or not has_trainable(layer, operator):
            continue
        if operator.name == ROUTER:
            if _has_expert_for_all(layer):  # which reads what the router reads
                yield index, _Use(kept_by=index, reads=kept[index], gradient=0.0, weight=0.0, last=False)
            continue
        following = operators[index + 1] if index + 1 < len(operators) else None
        kept_by, reads = _read(operators, index, setting, kept)
        yield (
            index,
            _Use(
                kept_by=kept_by,
                reads=reads,
                gradient=_written(layer, operator, following, setting) + inner_bytes(operator, setting),
                weight=_weight_bytes(layer, operator, setting, num_matrices[index]),
                last=not (
                    isinstance(operator, Matmul)
                    and isinstance(following, Matmul)
                    and kept[index + 1] == inner_bytes(following, setting)
                    and following.in_features == operator.in_features
                ),
            ),
        )


def _weight_bytes(layer: Layer, operator: Matmul | Lookup, setting: Setting, num_matrices: int) -> float:
    """Return the bytes of the gradients of an operator's trained weights, of so many matrices."""
    if layer.has_adapters:
        cut = {Shard.REPLICATED: 1, Shard.COLUMN: setting.grid.tp, Shard.ROW: setting.grid.tp}
        elements = float_sum(p.num_elements / cut[p.shard] for p in trainable_in(layer, operator))
        return elements * setting.element_bytes
    ranks = 1 if operator.shard is Shard.REPLICATED else setting.grid.tp
    return num_matrices * sum(p.num_elements for p in operator.parameters()) * setting.element_bytes / ranks


def _has_expert_for_all(layer: Layer) -> bool:
    return any(operator.name.startswith((SHARED, FOR_ALL)) for operator in layer.operators)


def _read(
    operators: Sequence[Operator], index: int, setting: Setting, kept: Sequence[float]
) -> tuple[int, float]:
    operator, previous = operators[index], operators[index - 1] if index else None
    if isinstance(operator, Lookup):
        return index, min(kept[index], _looked_up(operator, setting) * INDEX_BYTES)
    if kept[index] == inner_bytes(operator, setting) and isinstance(previous, Attention):
        width = previous.num_heads * previous.head_dim * setting.element_bytes / setting.grid.tp
        return index - 1, setting.tokens(previous) * width + kept[index]
    return index, kept[index]


def _written(layer: Layer, operator: Matmul | Lookup, following: Operator | None, setting: Setting) -> float:
    """Return the bytes of the output's gradient; 0 where it is that of the residual stream.

    So is the output's gradient of an MLP parallel to the attention.
    """
    size, tp = setting.element_bytes, setting.grid.tp
    if isinstance(operator, Lookup):
        return _looked_up(operator, setting) * operator.width * size
    is_parallel = operator.shard is Shard.ROW and not is_of_expert(operator)
    if is_parallel and isinstance(following, Matmul) and following.shard is Shard.COLUMN:
        return 0.0
    cut = tp if operator.shard is Shard.COLUMN else 1
    num_bytes = setting.tokens(operator) * operator.out_features * size / cut
    if layer.kind is not LayerKind.EMBED:
        return num_bytes
    # Patches beside a class token: a view of the gradient of all of the layer's output.
    return max(num_bytes, setting.work.tokens(layer.emits) / setting.grid.cp * layer.out_width * size)


def _looked_up(operator: Lookup, setting: Setting) -> float:
    """Return the rows read: of a table of positions once for all items, of tokens one per token."""
    tokens = setting.tokens(operator)
    if operator.name == POSITIONS:
        return min(tokens, operator.num_rows)
    return tokens if setting.looked_up is None else setting.looked_up
