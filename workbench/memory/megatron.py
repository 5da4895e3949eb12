"""What Megatron's layers keep for their backward: dropout masks, stored scores, sequence-parallel shards."""

from itertools import pairwise

from workbench.memory.adapters import inner_bytes
from workbench.memory.attended import keys_per_query
from workbench.memory.convolutions import input_width, num_read
from workbench.memory.indexer import fused_index_bytes
from workbench.memory.recurrence import fused_recurrence_bytes
from workbench.memory.setting import INDEX_BYTES, Setting
from workbench.model.block_modules import reads_alike
from workbench.model.diffusion import SHORTCUT
from workbench.model.experts import is_of_expert
from workbench.model.frozen import Needs
from workbench.model.latent_attention import KV_DOWN
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
from workbench.units import FLOAT32_BYTES

MASK_BYTES = 1  # of a dropout mask's element
GRADIENT_BYTES = 4  # gradients are summed in float32
DROPPED = ("residual", "add_positions")  # sums after a dropout, whose mask is kept
FREE = ("rotary", "scale")  # keep nothing


def megatron_saved(
    layer: Layer, needs: Needs, setting: Setting, *, stores_scores: bool, cuts_sequence: bool
) -> tuple[float, ...]:
    """[operators] bytes that each keeps on one rank from a forward to its backward.

    A block of width h over s tokens of b samples, a heads and t tensor-parallel ranks keeps
    s b h (10 + 24/t) bytes, 5 a s^2 b / t more with stored scores, and s b h 34/t where the
    sequence is cut too.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 4, equations 1-4.

    Complexity: O(operators).
    """
    if not needs.any:
        return (0.0,) * len(layer.operators)
    account = _Account(layer, setting, stores_scores, cuts_sequence)
    operators: tuple[Operator | None, ...] = (None, *layer.operators)
    return tuple(
        account.of(previous, operator) for previous, operator in pairwise(operators) if operator is not None
    )


class _Account:
    def __init__(self, layer: Layer, setting: Setting, stores_scores: bool, cuts_sequence: bool) -> None:  # noqa: FBT001
        self._layer, self._is_head = layer, layer.kind is LayerKind.HEAD
        self._setting, self._stores_scores = setting, stores_scores
        self._tp = setting.grid.tp
        self._replicas = self._tp if cuts_sequence else 1  # ranks that split what tp does not cut

    def of(self, previous: Operator | None, operator: Operator) -> float:
        tokens, size = self._setting.tokens(operator), self._setting.element_bytes
        if isinstance(operator, Attention):
            return self._attention(operator)
        if isinstance(operator, Recurrence):
            return tokens * fused_recurrence_bytes(operator, size) / self._tp
        if isinstance(operator, Lookup):
            return tokens * INDEX_BYTES
        if isinstance(operator, Matmul):
            is_kept = operator.name in (KV_DOWN, SHORTCUT)  # reads what queries come from, or a norm
            if is_kept or reads_alike(previous, operator) or _reads_kept_norm(previous, operator):
                return inner_bytes(operator, self._setting)  # what it reads is kept already
            cut = self._tp if operator.shard is Shard.ROW else self._replicas
            return tokens * input_width(self._layer, operator) * size / cut + inner_bytes(
                operator, self._setting
            )
        cut = self._replicas if operator.shard is Shard.REPLICATED else self._tp
        return tokens * operator.width * self._pointwise_bytes(operator) / cut

    def _pointwise_bytes(self, operator: Pointwise) -> int:
        """Return bytes per element."""
        if operator.name.endswith(FREE):
            return 0
        if operator.name.endswith(DROPPED):
            return MASK_BYTES
        if self._is_head and not operator.weights:
            return max(FLOAT32_BYTES, self._setting.element_bytes)
        return num_read(operator) * self._setting.element_bytes

    def _attention(self, operator: Attention) -> float:
        """Return the bytes of queries, keys and values, and of the softmax, its dropout mask and result."""
        tokens, size = self._setting.tokens(operator), self._setting.element_bytes
        num_kv_heads = operator.num_kv_heads * keys_per_query(self._layer, operator, self._setting)
        width = operator.num_heads * operator.head_dim + 2 * num_kv_heads * operator.mean_dim
        kept = tokens * width * size
        if self._stores_scores:
            pairs = sum(row.tokens_in**2 for row in self._setting.work.rows) / self._setting.grid.cp
            kept += operator.num_heads * pairs * (2 * size + MASK_BYTES)
        else:
            kept += tokens * operator.num_heads * FLOAT32_BYTES
        return kept / self._tp + tokens * fused_index_bytes(operator, self._setting)


def _reads_kept_norm(previous: Operator | None, operator: Matmul) -> bool:
    """Whether an MLP right after an output projection reads a norm that is kept already.

    So it does parallel to an attention, and as the expert of all tokens parallel to the router; other experts
    read rows of their own.
    """
    follows_projection = isinstance(previous, Matmul) and previous.shard is Shard.ROW
    return follows_projection and operator.shard is Shard.COLUMN and not is_of_expert(operator)
