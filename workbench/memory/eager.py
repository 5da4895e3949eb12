"""Bytes that unmodified transformers modules keep for their backward in PyTorch's eager mode."""

from typing import NamedTuple

from workbench.cost.expert_parallel import COMBINE, FOR_ALL, FOR_ALL_GATE, FOR_ALL_GATED
from workbench.memory.activations import ACTIVATIONS, activation_tensors
from workbench.memory.adapters import inner_width
from workbench.memory.attended import keys_per_query
from workbench.memory.block_form import UNSCALED, is_head_major, kept_of_unscaled
from workbench.memory.convolutions import input_width
from workbench.memory.indexer import eager_mask_bytes
from workbench.memory.recurrence import eager_recurrence_bytes
from workbench.memory.scores import score_bytes
from workbench.memory.setting import INDEX_BYTES, Setting
from workbench.memory.state_scan import eager_norm_bytes
from workbench.model.block_modules import reads_alike
from workbench.model.delta_net import GATED_NORM
from workbench.model.experts import (
    CHOSEN_SOFTMAX,
    CLAMPED,
    EXPERTS_NORM,
    JOIN,
    LATENT_DOWN,
    LATENT_UP,
    ROUTER,
    SCORES,
    SHARED,
    SHARED_GATE,
    SHARED_GATED,
    SIGMOID,
    WIDE_SOFTMAX,
    is_of_expert,
)
from workbench.model.frozen import Needs
from workbench.model.latent_attention import KV_DOWN, KV_UP, LATENT_ROTARY
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
from workbench.model.short_conv import PARTS, SHORT_CONV
from workbench.model.transformer import GATE, QUERY_SCALE, RELATIVE, RELATIVE_BIAS, XIELU, is_rms

# Memory-bound operators whose backward needs no tensor of the forward.
RESIDUAL = "residual"
LINEAR = (RESIDUAL, "pool", "add_positions", "class_token", "image_newline", "scale", RELATIVE_BIAS)
SCALE = "_scale"  # learned factors, one per channel
ROTARY = "rotary"
BIAS = "bias_values"  # a table of numbers that are added to scores
BIASES = (BIAS, RELATIVE)
READS_KEPT = (SHARED_GATE, FOR_ALL_GATE, KV_DOWN, LATENT_DOWN)  # what the expert, query or router reads


ByToken = Matmul | Attention | Pointwise | Lookup
"""Operators whose tensors have as many rows as there are tokens; a recurrence's have whole chunks."""


class Kept(NamedTuple):
    """What a layer keeps from its forward to its backward, on one rank.

    Args:
        num_bytes: all of it.
        input_bytes: the part that is the layer's input, a tensor that others may hold too.
    """

    num_bytes: int
    input_bytes: int


NOTHING = Kept(0, 0)


def eager_kept(layer: Layer, needs: Needs, setting: Setting) -> Kept:
    """Return the storages that autograd keeps, each counted once.

    Gradients reach an operator once its input needs one or a weight before it (its own
    included) is trained. Then, with D the operator's width:
      RMS norm: its input and one float32 a vector; where trained, the normalised input too;
      layer norm: its input and two float32 a vector;
      norm without weights: its input and one float32 a vector;
      matmul: where trained, its input, once for adjacent ones that share it; where its adapter is,
        also what is between the adapter's products;
      rotation: nothing of its own (its tables belong to the microbatch, see `shared_bytes`);
      attention: query, key, value, output, and a float32 a head and query; where a gate follows, the
      output as it reads it and the gate;
      recurrence: see `eager_recurrence_bytes`;
      activation: its input; where gated, its output and the other factor too;
      experts' results as they were before shares multiplied them, or inputs where shares multiply these;
      loss: log-probabilities in float32 and the targets; embedding: indices, and, where features
      are mixed with text, the text's vectors.

    Differs: from the accounting of fused kernels by a trained RMS norm's second tensor, by the
    three tensors of a gated activation (a fused one keeps two) and by what an activation
    written in Python multiplies.

    Complexity: O(operators).
    """
    if not needs.any:
        return NOTHING
    account = _accounted(layer, needs, setting)
    return Kept(round(account.total), round(account.input_bytes))


def eager_kept_by_operator(layer: Layer, needs: Needs, setting: Setting) -> tuple[float, ...]:
    """[operators] bytes of each, which add up to `eager_kept`."""
    if not needs.any:
        return (0.0,) * len(layer.operators)
    return tuple(_accounted(layer, needs, setting).by_operator)


def _accounted(layer: Layer, needs: Needs, setting: Setting) -> "_LayerAccount":
    account = _LayerAccount(layer, needs, setting)
    for operator in layer.operators:
        account.step(operator)
    return account


def shared_bytes(layer: Layer, needs: Needs, setting: Setting) -> int:
    """Return what all blocks of a stage keep together for one microbatch: tables of the rotation, indices.

    Cosines and sines of every position, and, where attention gathers, two indices a token.
    """
    attention = next((op for op in layer.operators if isinstance(op, Attention | Recurrence)), None)
    if not needs.any or attention is None:
        return 0
    rotation = next((op for op in layer.operators if op.name.endswith(ROTARY)), None)
    tables = 0.0
    if isinstance(attention, Attention) and isinstance(rotation, Pointwise):
        num_keys = 1 if rotation.name == LATENT_ROTARY else attention.num_kv_heads
        rotated = rotation.width / (attention.num_heads + num_keys)
        each = 1 if attention.has_sinks else 2  # gpt-oss has one angle for both numbers of a pair
        tables = each * rotated * setting.element_bytes
    indices = 2 * INDEX_BYTES if setting.is_gathered else 0
    return round(setting.tokens(attention) * (tables + indices))


class _LayerAccount:
    """Adds up what one layer keeps, in execution order."""

    def __init__(self, layer: Layer, needs: Needs, setting: Setting) -> None:
        self._layer, self._setting = layer, setting
        self._trained = needs.weight_grad and not layer.has_adapters
        self._adapts = needs.weight_grad and layer.has_adapters  # beside frozen weights
        self._live = needs.input_grad  # gradients reach the operator's input
        self._previous: Operator | None = None
        self._is_biased = any(op.name in BIASES for op in layer.operators)
        self._rotates = any(op.name.endswith(ROTARY) for op in layer.operators)
        self._is_gated = any(op.name == GATE for op in layer.operators)
        joins = [op for op in layer.operators if isinstance(op, Pointwise) and op.name in (JOIN, COMBINE)]
        self._num_chosen = sum(join.num_passes - 1 for join in joins)  # experts of a token
        self._routes_wide = any(op.name in (SIGMOID, WIDE_SOFTMAX) for op in layer.operators)
        self._has_shared = any(op.name.startswith((SHARED, FOR_ALL)) for op in layer.operators)
        self._copies = setting.copies_attention or is_head_major(layer)
        self.by_operator: list[float] = []
        self.total: float = 0.0
        self.input_bytes: float = 0.0

    def step(self, operator: Operator) -> None:
        before = self.total
        if isinstance(operator, Recurrence):
            self.total += eager_recurrence_bytes(operator, self._setting, is_trained=self._trained)
        else:
            width = self._kept_width(operator)
            self.total += self._setting.tokens(operator) * width + self._kept_scores(operator)
            self.total += self._kept_weight(operator)
        self.by_operator.append(self.total - before)
        if isinstance(operator, Matmul | Lookup) or (isinstance(operator, Pointwise) and operator.weights):
            self._live = self._live or self._trained or self._is_adapted(operator)
        passes = (QUERY_SCALE, JOIN, COMBINE, LATENT_UP)
        if not operator.name.endswith(ROTARY) and operator.name not in passes:
            self._previous = operator

    def _kept_weight(self, operator: ByToken) -> float:
        """Return the bytes of a weight that was copied to a wider type."""
        if not (isinstance(operator, Matmul) and self._is_widened(operator) and self._live):
            return 0.0
        return float(operator.in_features * operator.out_features * self._setting.wide_bytes)

    def _kept_width(self, operator: ByToken) -> float:
        """Return bytes per token."""
        size, tp = self._setting.element_bytes, self._setting.grid.tp
        if isinstance(operator, Lookup):
            return self._lookup(operator)
        if isinstance(operator, Matmul):
            wide = operator.in_features * self._setting.wide_bytes if self._is_widened(operator) else 0
            own = 0.0 if wide and not self._has_shared else self._matmul(operator)  # which a shared one reads
            inner = inner_width(operator) * size
            return own + wide + inner if self._trained or self._is_adapted(operator) else 0.0
        if isinstance(operator, Attention):
            return self._attention(operator) / tp if self._live else 0.0
        if operator.name.endswith((SCALE, RESIDUAL)) and operator.weights:
            # The factors' other operand.
            return operator.width * size / self._setting.cut(operator) if self._trained else 0.0
        if operator.name.endswith((*LINEAR, ROTARY)):
            return size if operator.name == QUERY_SCALE else 0.0  # the scale itself
        return self._pointwise(operator) / self._setting.cut(operator)

    def _attention(self, operator: Attention) -> float:
        """Return bytes per token; a capped one keeps keys and values repeated per head, but no output."""
        size = self._setting.element_bytes
        if operator.name == RELATIVE:  # a query and two positions
            return 3 * operator.num_heads * operator.head_dim * size
        if operator.is_capped:
            return 3 * operator.num_heads * operator.head_dim * size
        num_kv_heads = operator.num_kv_heads * keys_per_query(self._layer, operator, self._setting)
        elements = 2 * (operator.num_heads + num_kv_heads) * operator.head_dim
        return (elements + self._fused_extra(operator)) * size + operator.num_heads * self._setting.wide_bytes

    def _kept_scores(self, operator: Operator) -> float:
        """Return the bytes of tensors with an element for every pair of tokens of an item, in any order.

        A capped attention keeps two of them per head, and a mask of one byte per element; one with a learned
        bias its weights, and the positions of the bias in its table; a window shorter than an item a mask of
        numbers, see `eager_mask_bytes`; one with sinks nothing. A mask of the samples is one over
        all tokens.
        """
        lengths = set(self._setting.lengths)
        if operator.name == BIAS:
            return sum(n * n for n in lengths) * float(INDEX_BYTES) * self._trained
        is_alone = self._live and self._setting.grid.cp == 1 and operator.name != RELATIVE
        if not isinstance(operator, Attention) or operator.has_sinks or not is_alone:
            return 0.0
        if self._setting.masked_tokens:
            num_tokens = self._setting.masked_tokens  # one byte each: whether it attends to nothing
            return float(num_tokens) ** 2 * self._setting.element_bytes + num_tokens
        if self._is_biased:
            return score_bytes(operator, self._setting)
        if operator.is_capped:
            size, wide = self._setting.element_bytes, self._setting.wide_bytes
            narrowed = 0 if size == wide else size
            pairs = score_bytes(operator, self._setting) / wide
            return pairs * (size + wide + narrowed) + sum(n * n for n in lengths)
        return eager_mask_bytes(operator, self._setting)

    def _lookup(self, operator: Lookup) -> float:
        if operator.name == BIAS:
            return 0.0  # read pair by pair
        width = INDEX_BYTES * (self._trained + (self._layer.kind is LayerKind.EMBED))
        if self._setting.looked_up is None or not self._trained:
            return width
        share = self._setting.looked_up / self._setting.tokens(operator)
        return width + operator.width * self._setting.element_bytes * share

    def _matmul(self, operator: Matmul) -> float:
        if self._is_kept(operator):
            return 0.0
        width = input_width(self._layer, operator) * self._setting.element_bytes
        if self._previous is None:
            self._enter(operator, width)
        if self._is_for_all(operator):  # which the router reads, too, or a part of it
            width *= 1.0 - 1.0 / self._setting.grid.tp
        return width / (self._setting.grid.tp if operator.shard is Shard.ROW else 1)

    def _is_for_all(self, operator: Matmul) -> bool:
        """Whether it is the first product of an expert for all tokens, before which none are gathered."""
        enters = operator.name.startswith(f"{FOR_ALL}.") and operator.shard is Shard.COLUMN
        return enters and not self._setting.divides_tokens

    def _is_adapted(self, operator: Operator | None) -> bool:
        """Whether its adapter is trained."""
        return self._adapts and isinstance(operator, Matmul) and operator.lora is not None

    def _is_widened(self, operator: Matmul) -> bool:
        """Whether its input and weight are copied to float32 first, as GLM's router's are."""
        is_wide = self._setting.element_bytes == self._setting.wide_bytes
        return operator.name == ROUTER and self._routes_wide and not is_wide

    def _is_kept(self, operator: Matmul) -> bool:
        """Whether the input is kept already: an attention's output, unless copied, or a shared input.

        Adjacent operators share theirs: query, key, value; gate, up. An MLP right after an output projection
        is parallel to the attention and shares its norm.
        """
        previous = self._previous
        if operator.name in READS_KEPT or (self._adapts and not self._may_be_kept(previous)):
            return operator.name in READS_KEPT
        if isinstance(previous, Attention):
            return not self._copies and not previous.is_capped
        if _is_relu(previous) and operator.shard is Shard.ROW:
            return self._live  # it keeps its result
        if not isinstance(previous, Matmul) or operator.shard is not Shard.COLUMN:
            return False
        if is_of_expert(operator):  # reads rows of its own
            return False
        shares_norm = previous.shard is Shard.ROW and not self._setting.divides_tokens  # else gathered anew
        return shares_norm or reads_same(previous, operator)

    def _may_be_kept(self, previous: Operator | None) -> bool:
        """Whether what stands in front may keep a tensor: not frozen weights without an adapter."""
        return self._live and (isinstance(previous, Attention) or self._is_adapted(previous))

    def _pointwise(self, operator: Pointwise) -> float:
        size, wide = self._setting.element_bytes, self._setting.wide_bytes
        if operator.weights and not operator.name.endswith(
            (*ACTIVATIONS, SHORT_CONV)
        ):  # these may have biases
            return 0.0 if _is_relu(self._previous) else self._norm(operator)
        if not self._live:
            return 0.0
        if self._layer.kind is LayerKind.HEAD and operator.name == "loss":
            return operator.width * (wide + (size if operator.is_capped else 0)) + 2 * INDEX_BYTES
        if operator.name in (JOIN, COMBINE):
            return self._num_chosen * (operator.width * size + INDEX_BYTES)  # and the order of rows
        if operator.name in SCORES:
            return self._choice(operator)
        return self._activation(operator)

    def _choice(self, operator: Pointwise) -> float:
        """Return what a router keeps: which expert and where its row is, scores and shares."""
        size, wide = self._setting.element_bytes, self._setting.wide_bytes
        if operator.name == CHOSEN_SOFTMAX:
            return self._num_chosen * (2 * INDEX_BYTES + size)  # its scores are the shares
        return self._num_chosen * (2 * INDEX_BYTES + 2 * wide) + wide + self._activation(operator)

    def _activation(self, operator: Pointwise) -> float:
        """Return what an activation keeps, or a gate: itself and what it multiplies."""
        is_wide = operator.name in (SIGMOID, WIDE_SOFTMAX)
        size = self._setting.wide_bytes if is_wide else self._setting.element_bytes
        if operator.name == SHORT_CONV:  # gates and what the first multiplies; what is convolved, and gives
            return (PARTS + 2) * operator.width * size
        if operator.name == GATE:
            return 2 * operator.width * size
        if operator.name in UNSCALED:
            wide = self._setting.wide_bytes
            is_widened = self._setting.element_bytes < wide
            return kept_of_unscaled(self._layer, operator, is_widened=is_widened) * wide
        if operator.name in (SHARED_GATED, FOR_ALL_GATED):
            return (operator.width + 1) * size
        tensors = activation_tensors(operator)
        index = INDEX_BYTES if operator.name.endswith(CLAMPED) else 0  # of a row's expert, for its biases
        if operator.name.endswith(XIELU):
            return operator.width * ((tensors - (not self._trained)) * size + 1)  # and a byte of a sign
        return operator.width * (tensors + 2 if operator.num_passes > 2 else tensors) * size + index

    def _norm(self, operator: Pointwise) -> float:
        size, wide = self._setting.element_bytes, self._setting.wide_bytes
        vectors = operator.width / operator.weights[0][1]
        if is_rms(operator):
            normalised = operator.width * size if self._trained else 0.0
            if not self._live:
                return normalised
            if operator.name == GROUPED_NORM:
                return eager_norm_bytes(self._layer, operator, self._setting, is_trained=self._trained)
            if operator.name == GATED_NORM:  # the gate, activated too, and what it multiplies
                normalised += operator.width * (2 * wide + size)
            if operator.name == "q_norm" and self._is_gated and size == wide:  # a view beside the gates
                normalised += operator.width * size
            if size == wide and isinstance(self._previous, Matmul) and self._previous.name == KV_DOWN:
                normalised += (self._previous.out_features - operator.width) * size  # a view beside a key
            if size == wide:
                self._enter(operator, operator.width * size / self._setting.cut(operator))
            if operator.name == EXPERTS_NORM and size == wide:  # which reads what the MLP's norm reads
                return vectors * wide + normalised
            self.total += operator.width * wide  # the scale itself, where it is 1 + weight
            return operator.width * wide + vectors * wide + normalised
        if not (self._live or self._trained):
            return 0.0
        self._enter(operator, operator.width * size / self._setting.cut(operator))
        return operator.width * size + 2 * vectors * wide

    def _enter(self, operator: Operator, width: float) -> None:
        """Record the layer's input, which its first operator reads."""
        if self._previous is None and self._layer.kind is not LayerKind.EMBED:
            self.input_bytes = self._setting.tokens(operator) * width

    def _fused_extra(self, attention: Attention) -> float:
        """A value that is a view of a fused projection keeps the query and key in it, until gathered.

        So it is beside the key that is made of a latent, unless it is widened, which copies it.
        Where nothing rotates these, they are views of it themselves.
        """
        previous = self._previous
        if self._setting.is_gathered or not isinstance(previous, Matmul):
            return 0.0
        if previous.name == KV_UP and attention.value_dim is None:
            return previous.out_features - attention.num_heads * attention.head_dim
        if _is_fused(previous) and self._rotates:
            return (attention.num_heads + attention.num_kv_heads) * attention.head_dim
        return 0.0


def _is_relu(operator: Operator | None) -> bool:
    return isinstance(operator, Pointwise) and operator.name.endswith(".relu")


def reads_same(previous: Operator | None, operator: Operator) -> bool:
    """Whether two operators read one tensor: `reads_alike`, and the same tokens."""
    return previous is not None and reads_alike(previous, operator) and previous.tokens == operator.tokens


def _is_fused(operator: Operator | None) -> bool:
    return isinstance(operator, Matmul) and operator.name == "qkv_proj"
