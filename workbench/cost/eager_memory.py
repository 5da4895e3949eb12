"""Bytes that transformers' own modules hold in PyTorch's eager mode, operator by operator."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from workbench.cost.memory_setting import Setting
from workbench.graph.frozen import Needs
from workbench.graph.layer import Attention, Layer, LayerKind, Lookup, Matmul, Operator, Pointwise, Shard

INDEX_BYTES = 8

# Memory-bound operators whose backward needs no tensor of the forward.
LINEAR = ("residual", "pool", "add_positions", "class_token", "scale")
ROTARY = "rotary"

# Tensors that an activation keeps of its own kind: its input, or every factor of the formula
# where transformers spells it out in Python. A name that is not here counts as the largest.
ACTIVATION_TENSORS = {
    "relu": 1,
    "silu": 1,
    "gelu": 1,
    "gelu_pytorch_tanh": 1,
    "quick_gelu": 2,
    "gelu_new": 4,
}

# How many rows of the matmul that stands for a convolution read one element of its input:
# kernel over stride, for the overlapping convolutions of Whisper's stem.
OVERLAP = {"conv1": 3.0, "conv2": 1.5}


class Kept(NamedTuple):
    """What a layer keeps from its forward to its backward, on one rank.

    Args:
        num_bytes: all of it.
        input_bytes: the part that is the layer's own input, a tensor that others may hold too.
    """

    num_bytes: int
    input_bytes: int


NOTHING = Kept(0, 0)


def eager_kept(layer: Layer, needs: Needs, setting: Setting) -> Kept:
    """Storages that autograd keeps, each once.

    An operator is reached by gradients once its input needs one or a weight before it (its own
    included) is trained. Then, with D the operator's width:
      RMS norm: its input and one float32 a vector; where trained, the normalised input too;
      layer norm: its input and two float32 a vector;
      matmul: where trained, its input, once for neighbours that share it;
      rotation: nothing of its own (its tables belong to the microbatch, see `shared_bytes`);
      attention: query, key, value, output, and a float32 a head and query;
      activation: its input; where gated, its output and the other factor too;
      loss: log-probabilities in float32 and the targets; embedding: indices, and, where features
      stand beside text, the text's vectors.

    Differs: from the accounting of fused kernels by a trained RMS norm's second tensor, by the
    three tensors of a gated activation (a fused one keeps two) and by what an activation
    written in Python multiplies.

    Complexity: O(operators).
    """
    if not needs.any:
        return NOTHING
    walk = _walked(layer, needs, setting)
    return Kept(round(walk.total), round(walk.input_bytes))


def eager_kept_by_operator(layer: Layer, needs: Needs, setting: Setting) -> tuple[float, ...]:
    """[operators] their parts of `eager_kept`."""
    if not needs.any:
        return (0.0,) * len(layer.operators)
    return tuple(_walked(layer, needs, setting).by_operator)


def eager_input_working(layer: Layer, needs: Needs, setting: Setting) -> tuple[float, ...]:
    """[operators] bytes that the backward of each has in work where it computes no weight gradient.

    Gradients of what it wrote and read, twice the latter where neighbours read the same, and
    where no weight of the layer is trained those of the residual stream.
    """
    if not needs.weight_grad:
        return (float(eager_backward_working(layer, needs, setting)),) * len(layer.operators)
    found = []
    for previous, operator in pairwise((None, *layer.operators)):
        assert operator is not None
        width = _backward_width(operator, setting)
        if isinstance(operator, Matmul) and isinstance(previous, Matmul):
            width += operator.in_features * setting.element_bytes / setting.grid.tp
        found.append(setting.tokens(operator) * width)
    return tuple(found)


def _walked(layer: Layer, needs: Needs, setting: Setting) -> "_Walk":
    walk = _Walk(layer, needs, setting)
    for operator in layer.operators:
        walk.step(operator)
    return walk


def shared_bytes(layer: Layer, needs: Needs, setting: Setting) -> int:
    """What all blocks of a stage keep together for one microbatch: tables of the rotation, indices.

    Cosines and sines of every position, and, where attention gathers, two indices a token.
    """
    attention = next((op for op in layer.operators if isinstance(op, Attention)), None)
    if not needs.any or attention is None:
        return 0
    rotates = any(op.name.endswith(ROTARY) for op in layer.operators)
    tables = 2 * attention.head_dim * setting.element_bytes if rotates else 0
    indices = 2 * INDEX_BYTES if setting.is_gathered else 0
    return round(setting.tokens(attention) * (tables + indices))


class _Walk:
    """Adds up one layer in execution order."""

    def __init__(self, layer: Layer, needs: Needs, setting: Setting) -> None:
        self._layer, self._setting = layer, setting
        self._trained = needs.weight_grad
        self._live = needs.input_grad  # gradients reach the operator's input
        self._previous: Operator | None = None
        self._copies = setting.is_gathered or _is_head_major(layer)
        self.by_operator: list[float] = []
        self.total: float = 0.0
        self.input_bytes: float = 0.0

    def step(self, operator: Operator) -> None:
        before = self.total
        width = self._kept_width(operator)
        self.total += self._setting.tokens(operator) * width
        self.by_operator.append(self.total - before)
        if isinstance(operator, Matmul | Lookup) or (isinstance(operator, Pointwise) and operator.weights):
            self._live = self._live or self._trained
        if not operator.name.endswith(ROTARY):
            self._previous = operator

    def _kept_width(self, operator: Operator) -> float:
        """Bytes a token."""
        size, tp = self._setting.element_bytes, self._setting.grid.tp
        if isinstance(operator, Lookup):
            return self._lookup(operator)
        if isinstance(operator, Matmul):
            return self._matmul(operator) if self._trained else 0.0
        if isinstance(operator, Attention):
            elements = 2 * (operator.num_heads + operator.num_kv_heads) * operator.head_dim
            width = (elements + self._fused_extra(operator)) * size
            return (width + operator.num_heads * self._setting.wide_bytes) / tp if self._live else 0.0
        if operator.name.endswith((*LINEAR, ROTARY)):
            return 0.0
        return self._pointwise(operator) / self._setting.cut(operator)

    def _lookup(self, operator: Lookup) -> float:
        width = INDEX_BYTES * (self._trained + (self._layer.kind is LayerKind.EMBED))
        if self._setting.looked_up is None or not self._trained:
            return width
        share = self._setting.looked_up / self._setting.tokens(operator)
        return width + operator.width * self._setting.element_bytes * share

    def _matmul(self, operator: Matmul) -> float:
        if self._is_kept(operator):
            return 0.0
        width = operator.in_features / OVERLAP.get(operator.name, 1.0) * self._setting.element_bytes
        if self._previous is None:
            self._enter(operator, width)
        return width / (self._setting.grid.tp if operator.shard is Shard.ROW else 1)

    def _is_kept(self, operator: Matmul) -> bool:
        """An attention's output, unless it was copied; what neighbours share: query, key, value; gate, up.

        An MLP right behind an output projection stands beside the attention and shares its norm.
        """
        previous = self._previous
        if isinstance(previous, Attention):
            return not self._copies
        if not isinstance(previous, Matmul) or operator.shard is not Shard.COLUMN:
            return False
        shares_norm = previous.shard is Shard.ROW and not self._setting.divides_tokens  # else gathered anew
        return shares_norm or previous.in_features == operator.in_features

    def _pointwise(self, operator: Pointwise) -> float:
        size, wide = self._setting.element_bytes, self._setting.wide_bytes
        if operator.weights:
            return self._norm(operator)
        if not self._live:
            return 0.0
        if self._layer.kind is LayerKind.HEAD and operator.name == "loss":
            return operator.width * wide + 2 * INDEX_BYTES
        tensors = activation_tensors(operator)
        return operator.width * (tensors + 2 if operator.num_passes > 2 else tensors) * size

    def _norm(self, operator: Pointwise) -> float:
        size, wide = self._setting.element_bytes, self._setting.wide_bytes
        vectors = operator.width / operator.weights[0][1]
        is_rms = len(operator.weights) == 1
        if is_rms:
            normalised = operator.width * size if self._trained else 0.0
            if not self._live:
                return normalised
            if size == wide:
                self._enter(operator, operator.width * size / self._setting.cut(operator))
            self.total += operator.width * wide  # the scale itself, where it is 1 + weight
            return operator.width * wide + vectors * wide + normalised
        if not (self._live or self._trained):
            return 0.0
        self._enter(operator, operator.width * size / self._setting.cut(operator))
        return operator.width * size + 2 * vectors * wide

    def _enter(self, operator: Operator, width: float) -> None:
        """The first operator of a layer reads what the layer was given."""
        if self._previous is None and self._layer.kind is not LayerKind.EMBED:
            self.input_bytes = self._setting.tokens(operator) * width

    def _fused_extra(self, attention: Attention) -> float:
        """A value cut out of a fused projection keeps the query and key beside it, until gathered."""
        if _is_fused(self._previous) and not self._setting.is_gathered:
            return (attention.num_heads + attention.num_kv_heads) * attention.head_dim
        return 0.0


def activation_tensors(operator: Pointwise) -> int:
    """Tensors of its width that an activation keeps, gating aside."""
    name = operator.name.rpartition(".")[2]
    return ACTIVATION_TENSORS.get(name, max(ACTIVATION_TENSORS.values()))


def _is_fused(operator: Operator | None) -> bool:
    return isinstance(operator, Matmul) and operator.name == "qkv_proj"


def _is_head_major(layer: Layer) -> bool:
    """Whether attention lays queries out by head, so that its output is copied on the way out.

    In transformers: Whisper, the one architecture whose queries have a bias and keys none; Phi-3
    (one projection) and Phi (attention beside the MLP), which put queries together of rotated
    and other parts.
    """
    bias = {op.name: op.bias for op in layer.operators if isinstance(op, Matmul)}
    is_whisper = bias.get("q_proj", False) and not bias.get("k_proj", True)
    return is_whisper or _is_parallel(layer) or any(_is_fused(operator) for operator in layer.operators)


def _is_parallel(layer: Layer) -> bool:
    """Whether the MLP stands beside the attention and reads the same norm."""
    names = [operator.name for operator in layer.operators]
    return any(one == "o_proj" and other.startswith("mlp") for one, other in pairwise(names))


def eager_forward_working(layer: Layer, needs: Needs, setting: Setting) -> int:
    """Bytes alive at once inside a forward, besides what is kept and what others hold.

    The residual stream and the tensor it became, and the widest operator: of attention the
    projections twice (gathered, rotated or laid out anew) and its output twice; of a gated
    activation three tensors; of the head logits and log-probabilities. Where gradients run,
    most of these are kept: what comes on top is the stream and one tensor of the widest kind.
    """
    if needs.any:
        return _most(layer, setting, _extra_width)
    return _most(layer, setting, _forward_width)


def eager_backward_working(layer: Layer, needs: Needs, setting: Setting) -> int:
    """Bytes that the backward of a layer needs at once besides what was kept and what it is given.

    Gradients of the residual stream and of the widest operator's tensors. Where weights are
    trained, a matmul's input is given back before the tensors in front of it get gradients.
    """
    if not needs.any:
        return 0
    width = _trained_backward_width if needs.weight_grad else _backward_width
    return _most(layer, setting, width, _kept_behind(layer, needs, setting))


def eager_accumulating_working(layer: Layer, needs: Needs, setting: Setting) -> int:
    """As `eager_backward_working`, where the weights have gradients of earlier microbatches already.

    The gradient of a weight then exists beside the sum for a moment, with that of its matmul's input.
    """
    working = eager_backward_working(layer, needs, setting)
    if not needs.weight_grad:
        return working
    return max(working, _most(layer, setting, _no_width) + _with_weight(layer, setting))


def _with_weight(layer: Layer, setting: Setting) -> int:
    size, tp = setting.element_bytes, setting.grid.tp
    found = [0.0]
    for operator in layer.operators:
        weights = max((parameter.num_elements for parameter in operator.parameters()), default=0)
        beside = setting.tokens(operator) * operator.in_features if isinstance(operator, Matmul) else 0.0
        found.append((weights + beside) * size / tp)
    return round(max(found))


Width = Callable[[Operator, Setting], float]  # bytes a token


def _kept_behind(layer: Layer, needs: Needs, setting: Setting) -> float:
    """What operators behind a shared attention kept: it is given back when scores are made again."""
    places = [place for place, operator in enumerate(layer.operators) if isinstance(operator, Attention)]
    if setting.grid.cp == 1 or not places:
        return 0.0
    return sum(eager_kept_by_operator(layer, needs, setting)[places[0] + 1 :])


def _most(layer: Layer, setting: Setting, width: Width, given_back: float = 0.0) -> int:
    """Of the stream and the widest operator; `given_back` counts against attention.

    Where tokens are divided, parts of both stand beside the wholes that they come from or go to.
    """
    is_head = layer.kind is LayerKind.HEAD
    entering = next((op.in_features for op in layer.operators if isinstance(op, Matmul)), 0)
    regions = 2 if _is_parallel(layer) else 1  # at a time
    parts = 2 * regions * entering / setting.grid.tp if setting.divides_tokens else 0.0
    stream = (parts + (0 if is_head else 2 * layer.out_width)) * setting.element_bytes
    tokens = max((setting.tokens(operator) for operator in layer.operators), default=0.0)
    inner = max(
        (
            setting.tokens(op) * width(op, setting) - given_back * isinstance(op, Attention)
            for op in layer.operators
        ),
        default=0.0,
    )
    return round(tokens * stream + inner)


def _forward_width(operator: Operator, setting: Setting) -> float:
    size, tp = setting.element_bytes, setting.grid.tp
    if isinstance(operator, Attention):
        queries, both = _attention_widths(operator)
        return 2 * (both + queries) * size / tp + _shared_scores(operator, setting, copies=3)
    if isinstance(operator, Matmul):
        return (operator.in_features / OVERLAP.get(operator.name, 1.0) + operator.out_features) * size / tp
    if isinstance(operator, Lookup):
        return 3 * operator.width * size / tp
    if operator.name == "loss":
        return 2 * operator.width * setting.wide_bytes / tp
    if operator.weights:
        return 3 * operator.width * setting.wide_bytes
    return operator.width * max(operator.num_passes, activation_tensors(operator) + 1) * size / tp


def _backward_width(operator: Operator, setting: Setting) -> float:
    size, tp = setting.element_bytes, setting.grid.tp
    if isinstance(operator, Attention):
        queries, both = _attention_widths(operator)
        return (both + 3 * queries) * size / tp + _shared_scores(operator, setting, copies=4)
    return _forward_width(operator, setting)


def _no_width(operator: Operator, setting: Setting) -> float:
    del operator, setting
    return 0.0


def _trained_backward_width(operator: Operator, setting: Setting) -> float:
    width = _backward_width(operator, setting)
    if isinstance(operator, Pointwise) and not operator.weights and operator.name != "loss":
        width -= operator.width * setting.element_bytes / setting.grid.tp
    return width


def _extra_width(operator: Operator, setting: Setting) -> float:
    """One tensor of the operator, or what the loss makes before it keeps the log-probabilities."""
    size, tp = setting.element_bytes, setting.grid.tp
    if isinstance(operator, Attention):
        return _attention_widths(operator)[1] * size / tp + _shared_scores(operator, setting, copies=3)
    if isinstance(operator, Matmul):
        return operator.out_features * size / tp
    if isinstance(operator, Lookup):
        return operator.width * size / (1 if operator.shard is Shard.REPLICATED else tp)
    return operator.width * size / setting.cut(operator)


def _shared_scores(attention: Attention, setting: Setting, *, copies: int) -> float:
    """Where ranks share the tokens: scores of one key/value head's queries over all keys, in so many
    copies, and two heads of everybody's keys and values with their gradients.
    """
    if setting.grid.cp == 1:
        return 0.0
    scores = attention.num_heads // attention.num_kv_heads * setting.work.tokens(attention.tokens)
    gathered = 8 * attention.head_dim * setting.grid.cp
    return float((copies * scores + gathered) * setting.wide_bytes)


def _attention_widths(attention: Attention) -> tuple[int, int]:
    """Queries; queries, keys and values."""
    queries = attention.num_heads * attention.head_dim
    return queries, queries + 2 * attention.num_kv_heads * attention.head_dim
