"""Working memory inside unmodified transformers modules in PyTorch's eager mode, operator by operator."""

from collections.abc import Iterator, Sequence

from workbench.cost.expert_parallel import COMBINE, FOR_ALL, FOR_ALL_GATED
from workbench.float_sum import float_sum
from workbench.memory.activations import activation_tensors
from workbench.memory.block_form import UNSCALED, is_head_major, is_parallel
from workbench.memory.convolutions import input_width
from workbench.memory.eager import (
    BIASES,
    RESIDUAL,
    ROTARY,
    SCALE,
    ByToken,
    reads_same,
)
from workbench.memory.grouped_experts import joined_tensors
from workbench.memory.recurrence import eager_recurrence_working
from workbench.memory.scores import (
    NO_SCORES,
    WorkingScores,
    attention_widths,
    gradient_width,
    shared_scores,
    working_scores,
)
from workbench.memory.setting import Setting
from workbench.model.delta_net import GATED_NORM
from workbench.model.experts import JOIN, SHARED, SHARED_GATED, is_of_expert
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
from workbench.model.transformer import XIELU, is_rms

GATE_UP, UP = "gate_up", ".up"  # one product for both halves of a gated MLP, or without a gate
ROWS_FORWARD, ROWS_BACKWARD = 4, 3  # copies of the rows that distributed experts received
RMS_BACKWARD = 5  # wide tensors at once
MOST_FORWARD, MOST_BACKWARD = 4, 3  # working tensors of an activation written in Python
IN_PYTHON = {"relu2": (2, 4), XIELU: (4, 5)}  # the same of those that were counted, forward and backward


def _neighbours(
    operators: Sequence[Operator],
) -> Iterator[tuple[Operator | None, Operator, Operator | None]]:
    return zip((None, *operators[:-1]), operators, (*operators[1:], None), strict=True)


class OperatorBytes:
    """Bytes of each operator's tensors, and of the residual stream beside them."""

    def __init__(self, layer: Layer, needs: Needs, setting: Setting) -> None:
        self._layer, self._setting = layer, setting
        self._trained = needs.weight_grad and not layer.has_adapters
        self._size, self._tp = setting.element_bytes, setting.grid.tp
        self._copies = setting.copies_attention or is_head_major(layer)
        self._is_halved = any(op.name.endswith(GATE_UP) for op in layer.operators)
        self._has_two_sums = sum(op.name.endswith(RESIDUAL) for op in layer.operators) != 1
        self._is_biased = any(op.name in BIASES for op in layer.operators)
        self._has_shared = any(op.name.startswith((SHARED, FOR_ALL)) for op in layer.operators)
        self._scales_sum = any(_is_scale(op) for op in layer.operators)
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
        beside = self._scores(operator).forward + self._rows(operator, ROWS_FORWARD)
        width = self._forward_width(operator) + self._bias_rows(operator)
        return tokens * width + beside + input_bytes

    def beside_kept(self, operator: Operator) -> float:
        """Return the bytes of a forward besides what it and the operators before it keep."""
        if isinstance(operator, Recurrence):
            return eager_recurrence_working(operator, self._setting).beside_kept
        beside = self._scores(operator).beside_kept + self._rows(operator, ROWS_FORWARD)
        width = self._extra_width(operator) + self._bias_rows(operator)
        return self._setting.tokens(operator) * width + beside

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
            beside = self._scores(operator).backward + self._rows(operator, ROWS_BACKWARD)
            beside += self._waiting(operator)
            sizes.append(self._setting.tokens(operator) * width + beside)
        return sizes

    def _waiting(self, operator: Operator) -> float:
        """Return the bytes of gradients that wait beside a shared expert or routed ones.

        The shared expert's backward is the first: the gradient of what it read waits for theirs. The gradient
        of their sum, where a number multiplies that, waits for the last to read it.
        """
        is_shared = operator.name.startswith((SHARED, FOR_ALL))
        is_joined = is_of_expert(operator) or operator.name in (JOIN, COMBINE)
        if not self._has_shared or not (is_shared or is_joined):
            return 0.0
        of_sum = self._scales_sum and not is_of_expert(operator)
        return (is_joined + of_sum) * self._hidden

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
        return copies * float_sum(rows)

    def _scores(self, operator: Operator) -> WorkingScores:
        if not isinstance(operator, Attention):
            return NO_SCORES
        return working_scores(operator, self._setting, is_biased=self._is_biased)

    def _written(self, operator: Matmul) -> float:
        cut = self._tp if operator.shard is Shard.COLUMN else 1
        return operator.out_features * self._size / cut

    def _read(self, operator: Matmul) -> float:
        cut = self._tp if operator.shard is Shard.ROW else 1
        return input_width(self._layer, operator) * self._size / cut

    def _beside(self, operator: Matmul) -> float:
        """Return bytes per token of its adapter: its result, or gradients of that and of its input."""
        if operator.lora is None:
            return 0.0
        written, rank = self._written(operator), operator.lora.rank * self._size
        return written + max(written, self._read(operator)) + rank

    def _bias_rows(self, operator: ByToken) -> float:
        """Return bytes per row of an expert's bias, which is read row by row before it is added."""
        if not isinstance(operator, Matmul) or not operator.bias or not is_of_expert(operator):
            return 0.0
        return self._written(operator)

    def _forward_width(self, operator: ByToken) -> float:
        """Return bytes per token."""
        size, setting = self._size, self._setting
        if isinstance(operator, Attention):
            queries, both = attention_widths(operator)
            width = both * (1 + self._moves) + queries * (1 + self._copies)
            return width * size / self._tp + shared_scores(operator, setting, copies=3)
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
            queries, _ = attention_widths(operator)
            return queries * size / self._tp + shared_scores(operator, setting, copies=3)
        if isinstance(operator, Matmul):
            return self._written(operator) + self._beside(operator)
        if isinstance(operator, Lookup):
            return operator.width * size / (1 if operator.shard is Shard.REPLICATED else self._tp)
        if operator.name == "loss":
            return (2 if self._tp > 1 else 1) * operator.width * setting.wide_bytes / self._tp
        tensor = operator.width * size / setting.cut(operator)
        if operator.name == JOIN:
            return joined_tensors(self._layer, operator, size, setting.wide_bytes).beside_kept * tensor
        return 0.0 if operator.name.endswith(RESIDUAL) else tensor  # that is the stream

    def _backward_width(self, operator: ByToken) -> float:
        setting = self._setting
        if isinstance(operator, Attention):
            return gradient_width(operator, setting) + shared_scores(operator, setting, copies=4)
        if not isinstance(operator, Pointwise):
            return self._forward_width(operator)
        if operator.name == "loss":
            logits = 3 if self._tp > 1 else 2  # gradients of the target's, of the powers, and their sum
            return logits * operator.width * setting.wide_bytes / self._tp
        if operator.weights and not _is_rms_alone(operator) and _in_python(operator) is None:
            tensor = operator.width * setting.wide_bytes / setting.cut(operator)
            of_gate = tensor if operator.name == GROUPED_NORM else 0.0
            return self._forward_width(operator) + of_gate
        return self._gradients(operator) * operator.width * self._size / setting.cut(operator)

    def _gradients(self, operator: Pointwise) -> float:
        """Return how many tensors of its width, in the type of activations, its backward has in work."""
        if operator.name.endswith(RESIDUAL):
            return 0.0  # it hands on what it receives
        if operator.name == JOIN:
            return joined_tensors(self._layer, operator, self._size, self._setting.wide_bytes).backward
        if operator.name in (SHARED_GATED, FOR_ALL_GATED):
            return 2.0  # gradients of both factors
        if counted := _in_python(operator):
            signs = 1 if operator.name.endswith(XIELU) else 0  # bytes that are no longer kept then
            return counted[1] - signs / self._size
        if _is_rms_alone(operator):
            return self._rms_gradients(operator)
        return max(operator.num_passes, min(activation_tensors(operator) + 1, MOST_BACKWARD))

    def _rms_gradients(self, norm: Pointwise) -> float:
        """Return the tensors of an RMS norm's backward while it is at the square.

        The gradient of the factor that is the input, that of the mean, spread over what it is of, and, as a
        power's gradient is written, the input, twice the input and its product: all wide. The scaled input
        that a trained norm kept is no longer there.
        """
        scaled = 1 if self._trained and norm.weights else 0
        return RMS_BACKWARD * self._setting.wide_bytes / self._size - scaled


def _is_rms_alone(operator: Pointwise) -> bool:
    """Whether it is an RMS norm and nothing else."""
    if operator.name in UNSCALED:
        return True
    return (
        operator.name.endswith("norm")
        and operator.name not in (GROUPED_NORM, GATED_NORM)
        and is_rms(operator)
    )


def _in_python(operator: ByToken) -> tuple[int, int] | None:
    return IN_PYTHON.get(operator.name.rpartition(".")[2])


def _width(operator: Operator) -> int:
    assert isinstance(operator, Pointwise | Lookup), "others have a width on either side"
    return operator.width


def _is_scale(operator: Operator) -> bool:
    """Whether a number multiplies what an MLP gives to the stream."""
    return isinstance(operator, Pointwise) and operator.name == f"mlp{SCALE}" and not operator.weights
