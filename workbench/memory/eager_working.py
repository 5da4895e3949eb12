"""Working memory inside unmodified transformers modules in PyTorch's eager mode, operator by operator."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from workbench.cost.expert_parallel import COMBINE
from workbench.memory.activations import activation_tensors
from workbench.memory.block_form import is_head_major, is_parallel
from workbench.memory.eager import (
    BIAS,
    OVERLAP,
    RESIDUAL,
    ROTARY,
    ByToken,
    reads_same,
    score_bytes,
)
from workbench.memory.recurrence import eager_recurrence_working
from workbench.memory.setting import Setting
from workbench.model.experts import is_of_expert
from workbench.model.frozen import Needs
from workbench.model.layer import (
    Attention,
    Layer,
    LayerKind,
    Lookup,
    Matmul,
    Operator,
    Pointwise,
    Recurrence,
    Shard,
)
from workbench.model.mamba import GROUPED_NORM
from workbench.model.trained import trainable_in
from workbench.model.transformer import XIELU

GATE_UP, UP = "gate_up", ".up"  # one product for both halves of a gated MLP, or without a gate
ROWS_FORWARD, ROWS_BACKWARD = 4, 3  # copies of the rows that distributed experts received
MOST_FORWARD, MOST_BACKWARD = 4, 3  # working tensors of an activation written in Python
IN_PYTHON = {"relu2": (2, 4), XIELU: (4, 5)}  # the same of those that were counted, forward and backward


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
    operators = _OperatorBytes(layer, setting)
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
        round(peak.with_gradients(so_far) - sum(gradients)),
        round(peak.with_gradients(gradients)),
    )


def _gradient_bytes(layer: Layer, operator: Operator, setting: Setting) -> float:
    """Return the bytes of the gradients of its trained weights on one rank."""
    elements = (
        parameter.num_elements / (1 if parameter.shard is Shard.REPLICATED else setting.grid.tp)
        for parameter in trainable_in(layer, operator)
    )
    return sum(elements) * setting.element_bytes


def eager_input_working(layer: Layer, needs: Needs, setting: Setting) -> tuple[float, ...]:
    """[operators] working bytes of each one's backward where it computes no weight gradient.

    Complexity: O(operators).
    """
    operators = _OperatorBytes(layer, setting)
    is_kept = needs.weight_grad and not layer.has_adapters  # for W; adapters keep it scaled, beside it
    stream_gradient = 0.0 if is_kept else operators.gradient
    return tuple(own + stream_gradient for own in operators.backward())


def _forward_peak(operators: "_OperatorBytes", layer: Layer, needs: Needs, kept: Sequence[float]) -> float:
    current = peak = 0.0
    in_work = operators.beside_kept if needs.any else operators.forward
    for operator, own_kept in zip(layer.operators, kept, strict=True):
        current += own_kept
        peak = max(peak, current + in_work(operator))
    is_kept = needs.weight_grad and layer.kind is LayerKind.PROJECTOR
    return peak - current + (0.0 if is_kept else operators.stream)


class _BackwardPeak:
    """The peak of a backward besides what the forward kept."""

    def __init__(self, operators: "_OperatorBytes", kept: Sequence[float]) -> None:
        pairs = zip(accumulate(kept), operators.backward(), strict=True)
        self._held = [still_kept + in_work for still_kept, in_work in pairs]
        self._gradient, self._kept = operators.gradient, sum(kept)

    def with_gradients(self, gradients: Sequence[float]) -> float:
        """Return the peak; `gradients` [operators]: weights' gradients while the backward is at each."""
        peak = max(map(add, self._held, gradients), default=0.0)
        return peak + self._gradient - self._kept


def _neighbours(
    operators: Sequence[Operator],
) -> Iterator[tuple[Operator | None, Operator, Operator | None]]:
    return zip((None, *operators[:-1]), operators, (*operators[1:], None), strict=True)


class _OperatorBytes:
    """Bytes of each operator's tensors, and of the residual stream beside them."""

    def __init__(self, layer: Layer, setting: Setting) -> None:
        self._layer, self._setting = layer, setting
        self._size, self._tp = setting.element_bytes, setting.grid.tp
        self._copies = setting.copies_attention or is_head_major(layer)
        self._is_halved = any(op.name.endswith(GATE_UP) for op in layer.operators)
        self._has_two_sums = sum(op.name.endswith(RESIDUAL) for op in layer.operators) != 1
        self._is_biased = any(op.name == BIAS for op in layer.operators)
        self._moves = setting.is_gathered or any(op.name.endswith(ROTARY) for op in layer.operators)

    @property
    def stream(self) -> float:
        """What enters a block, and the first of two sums; a projector's norm exists beside its input.

        Where tokens are divided, parts of both exist beside the whole tensors.
        """
        layer, setting = self._layer, self._setting
        match layer.kind:
            case LayerKind.HEAD:
                return self._parts
            case LayerKind.PROJECTOR:
                first = layer.operators[0]
                width = first.in_features if isinstance(first, Matmul) else _width(first)
                return 2 * setting.tokens(first) * width * self._size
            case LayerKind.BLOCK:
                return self._parts + (2 if self._has_two_sums else 1) * self._hidden
        leaving = setting.work.tokens(layer.emits) / setting.grid.cp * layer.out_width * self._size
        return self._parts + self._hidden + leaving

    @property
    def gradient(self) -> float:
        """Bytes of the residual stream's gradient; what the layer receives is counted by its holder."""
        if self._layer.kind in (LayerKind.HEAD, LayerKind.PROJECTOR):
            return self._parts
        return self._parts + self._hidden

    @property
    def _hidden(self) -> float:
        """Bytes of the residual stream, without what passes beside it to a later layer."""
        sums = (_width(operator) for operator in self._layer.operators if operator.name.endswith(RESIDUAL))
        return self._tokens * min(sums, default=self._layer.out_width) * self._size

    @property
    def _tokens(self) -> float:
        """The most tokens of any operator but experts, whose rows are more; of an embedding's output."""
        if self._layer.kind is LayerKind.EMBED:
            return self._setting.work.tokens(self._layer.emits) / self._setting.grid.cp
        whole = (operator for operator in self._layer.operators if not is_of_expert(operator))
        return max(map(self._setting.tokens, whole), default=0.0)

    @property
    def _parts(self) -> float:
        if not self._setting.divides_tokens:
            return 0.0
        entering = next((op.in_features for op in self._layer.operators if isinstance(op, Matmul)), 0)
        regions = 2 if is_parallel(self._layer) else 1  # at a time
        return self._tokens * 2 * regions * entering / self._tp * self._size

    def forward(self, operator: Operator) -> float:
        """Return the bytes of a forward that keeps nothing: the operator's, and the layer's input."""
        if isinstance(operator, Recurrence):
            return self._hidden + eager_recurrence_working(operator, self._setting).forward
        tokens = self._setting.tokens(operator)
        input_bytes = 0.0
        if self._layer.kind is LayerKind.BLOCK:
            input_bytes = self._hidden
        beside = self._scores(operator, 2) + self._rows(operator, ROWS_FORWARD)
        return tokens * self._forward_width(operator) + beside + input_bytes

    def beside_kept(self, operator: Operator) -> float:
        """Return the bytes of a forward besides what it and the operators before it keep."""
        if isinstance(operator, Recurrence):
            return eager_recurrence_working(operator, self._setting).beside_kept
        beside = self._scores(operator, 1) + self._rows(operator, ROWS_FORWARD)
        return self._setting.tokens(operator) * self._extra_width(operator) + beside

    def backward(self) -> list[float]:
        """[operators] gradients of what each wrote and read, and those that wait for it or for others.

        Where adjacent operators read one tensor, the gradients of the earlier ones' outputs wait, and so does
        the sum of what the later ones added to their input's gradient.
        """
        sizes, waiting = [], 0.0
        for previous, operator, following in _neighbours(self._layer.operators):
            if isinstance(operator, Recurrence):
                sizes.append(eager_recurrence_working(operator, self._setting).backward)
                continue
            width = self._backward_width(operator)
            if isinstance(operator, Matmul) and self._hands_on(following):
                width -= self._written(operator)  # whose gradient is the stream's, or was received
            if (
                isinstance(previous, Matmul)
                and isinstance(operator, Matmul)
                and reads_same(previous, operator)
            ):
                waiting += self._written(previous)
                width += waiting + self._read(operator)
            else:
                waiting = 0.0
            beside = self._scores(operator, 3) + self._rows(operator, ROWS_BACKWARD)
            sizes.append(self._setting.tokens(operator) * width + beside)
        return sizes

    def _hands_on(self, following: Operator | None) -> bool:
        """Whether the result before this operator, or before the layer's end, leaves the layer."""
        if following is None:
            return self._layer.kind is LayerKind.PROJECTOR
        return following.name.endswith(RESIDUAL)

    def _rows(self, operator: Operator, copies: int) -> float:
        """Return the bytes of rows that distributed experts receive, and of their outputs."""
        if operator.name != COMBINE:
            return 0.0
        entering = (
            op for op in self._layer.operators if isinstance(op, Matmul) and op.name.endswith((GATE_UP, UP))
        )
        rows = (self._setting.tokens(op) * self._read(op) for op in entering if is_of_expert(op))
        return copies * sum(rows)

    def _scores(self, operator: Operator, copies: int) -> float:
        """Return the working bytes of scores, of an attention that stores them."""
        if not isinstance(operator, Attention) or not (_stores_scores(operator) or self._is_biased):
            return 0.0
        return copies * score_bytes(operator, self._setting)

    def _written(self, operator: Matmul) -> float:
        cut = self._tp if operator.shard is Shard.COLUMN else 1
        return operator.out_features * self._size / cut

    def _read(self, operator: Matmul) -> float:
        cut = self._tp if operator.shard is Shard.ROW else 1
        return operator.in_features / OVERLAP.get(operator.name, 1.0) * self._size / cut

    def _beside(self, operator: Matmul) -> float:
        """Return bytes per token of its adapter: its result, or gradients of that and of its input."""
        if operator.lora is None:
            return 0.0
        written, rank = self._written(operator), operator.lora.rank * self._size
        return written + max(written, self._read(operator)) + rank

    def _forward_width(self, operator: ByToken) -> float:
        """Return bytes per token."""
        size, setting = self._size, self._setting
        if isinstance(operator, Attention):
            queries, both = _attention_widths(operator)
            width = both * (1 + self._moves) + queries * (1 + self._copies)
            return width * size / self._tp + _shared_scores(operator, setting, copies=3)
        if isinstance(operator, Matmul):
            return self._read(operator) + self._written(operator) + self._beside(operator)
        if isinstance(operator, Lookup):
            return 3 * operator.width * size / self._tp
        if operator.name == "loss":
            # As they are, less the largest, as powers; or log-probabilities.
            logits = 3 if self._tp > 1 else 2
            return (logits + operator.is_capped) * operator.width * setting.wide_bytes / self._tp
        if operator.weights and _in_python(operator) is None:
            return 3 * operator.width * setting.wide_bytes / setting.cut(operator)
        tensors = max(operator.num_passes, min(activation_tensors(operator) + 1, MOST_FORWARD))
        tensors, _ = _in_python(operator) or (tensors, 0)
        if self._is_halved and operator.num_passes > 2:
            tensors += 1  # gate and up, halves of one tensor, stay until both are done with
        return operator.width * tensors * size / setting.cut(operator)

    def _extra_width(self, operator: ByToken) -> float:
        """Return bytes per token of one tensor of the operator."""
        size, setting = self._size, self._setting
        if isinstance(operator, Attention):
            queries, _ = _attention_widths(operator)
            return queries * size / self._tp + _shared_scores(operator, setting, copies=3)
        if isinstance(operator, Matmul):
            return self._written(operator) + self._beside(operator)
        if isinstance(operator, Lookup):
            return operator.width * size / (1 if operator.shard is Shard.REPLICATED else self._tp)
        if operator.name == "loss":
            return (2 if self._tp > 1 else 1) * operator.width * setting.wide_bytes / self._tp
        if operator.name.endswith(RESIDUAL):
            return 0.0  # the stream
        return operator.width * size / setting.cut(operator)

    def _backward_width(self, operator: ByToken) -> float:
        size, setting = self._size, self._setting
        if isinstance(operator, Attention):
            queries, both = _attention_widths(operator)
            return (both + 3 * queries) * size / self._tp + _shared_scores(operator, setting, copies=4)
        if isinstance(operator, Pointwise) and operator.name == "loss":
            logits = 3 if self._tp > 1 else 2  # gradients of the target's, of the powers, and their sum
            return logits * operator.width * setting.wide_bytes / self._tp
        if isinstance(operator, Pointwise) and (counted := _in_python(operator)):
            signs = 1 if operator.name.endswith(XIELU) else 0  # bytes that are no longer kept then
            return (counted[1] * size - signs) * operator.width / setting.cut(operator)
        if isinstance(operator, Pointwise) and not operator.weights:
            tensors = max(operator.num_passes, min(activation_tensors(operator) + 1, MOST_BACKWARD))
            return operator.width * tensors * size / setting.cut(operator)
        if isinstance(operator, Pointwise) and operator.name == GROUPED_NORM:  # and the gate's
            return self._forward_width(operator) + operator.width * setting.wide_bytes / setting.cut(operator)
        return self._forward_width(operator)


def _in_python(operator: ByToken) -> tuple[int, int] | None:
    return IN_PYTHON.get(operator.name.rpartition(".")[2])


def _stores_scores(attention: Attention) -> bool:
    """Whether all scores of an item are in memory while it computes."""
    return attention.is_capped or attention.has_sinks


def _width(operator: Operator) -> int:
    assert isinstance(operator, Pointwise | Lookup), "others have a width on either side"
    return operator.width


def _shared_scores(attention: Attention, setting: Setting, *, copies: int) -> float:
    """Return bytes per token of `copies` of the scores, and of keys and values, where ranks share tokens."""
    if setting.grid.cp == 1:
        return 0.0
    scores = attention.num_heads // attention.num_kv_heads * setting.work.tokens(attention.tokens)
    gathered = 8 * attention.head_dim * setting.grid.cp
    return float((copies * scores + gathered) * setting.wide_bytes)


def _attention_widths(attention: Attention) -> tuple[int, int]:
    """Return the width of queries, and of queries, keys and values together."""
    queries = attention.num_heads * attention.head_dim
    return queries, queries + 2 * attention.num_kv_heads * attention.head_dim
