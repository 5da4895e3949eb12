"""Working memory inside layers of fused kernels: the operator with most in work, and what ranks exchange."""

from typing import NamedTuple

from workbench.cost.expert_parallel import COMBINE
from workbench.memory.convolutions import input_width
from workbench.memory.eager import LINEAR
from workbench.memory.grouped_experts import with_grouped_experts
from workbench.memory.indexer import fused_score_bytes
from workbench.memory.setting import Setting
from workbench.model.experts import JOIN, is_of_expert
from workbench.model.layer import Attention, Layer, Lookup, Matmul, Operator, Pointwise, Recurrence, Shard
from workbench.plan.gathered_heads import heads_per_gather
from workbench.plan.plan import KeyExchange

IN_FLIGHT = 2  # blocks of keys and values at a time: one is read while the next one comes
GATED_PASSES = 3  # of an activation or a norm with a gate: both are read, their product is written


class FusedWorking(NamedTuple):
    """Bytes alive while a layer computes, besides what it keeps."""

    forward: int
    backward: int


def fused_working(layer: Layer, setting: Setting) -> FusedWorking:
    """Return the bytes of the operator with most in work: its inputs and output, and those of other ranks.

    A backward reads the gradient of the output and writes those of the inputs, which are as large.

    Experts of a rank are one operator, as they are one kernel. Where they are distributed, rows that leave
    and rows that arrive exist beside each other. Context-parallel ranks have keys and values of others in
    work, and in a backward their gradients, see `_keys_of_others`. An indexer's forward has all scores of an
    item in work.

    Args:
        layer: of one rank, see `on_rank`.
        setting: its work.

    Complexity: O(operators).
    """
    forward = backward = 0.0
    for operator in with_grouped_experts(layer).layer.operators:
        own = setting.tokens(operator) * _width(layer, operator, setting) * setting.element_bytes
        keys = _keys_of_others(operator, setting) if isinstance(operator, Attention) else (0.0, 0.0)
        scores = fused_score_bytes(operator, setting) if isinstance(operator, Attention) else 0.0
        forward, backward = max(forward, own + keys[0], scores), max(backward, own + keys[1])
    exchanged = _exchanged_bytes(layer, setting)
    return FusedWorking(round(max(forward, exchanged)), round(max(backward, exchanged)))


def _width(layer: Layer, operator: Operator, setting: Setting) -> float:
    """Return the width of inputs and output together, which is that of their gradients, too."""
    tp = setting.grid.tp
    if isinstance(operator, Attention):
        return _attention_width(operator, setting)
    if isinstance(operator, Recurrence):
        return (operator.width + operator.value_width) / tp
    if isinstance(operator, Matmul):
        n = operator.out_features / (tp if operator.shard is Shard.COLUMN else 1)
        n *= 1 if operator.lora is None else 2  # and the adapter's result
        return n + input_width(layer, operator) / (tp if operator.shard is Shard.ROW else 1)
    if isinstance(operator, Lookup):
        return operator.width
    return _num_tensors(operator) * operator.width / (1 if operator.shard is Shard.REPLICATED else tp)


def _attention_width(operator: Attention, setting: Setting) -> float:
    return 2 * (operator.num_heads + operator.num_kv_heads) * operator.mean_dim / setting.grid.tp


def _num_tensors(operator: Pointwise) -> int:
    """Return the tensors that a kernel reads and writes.

    Two and one of a gate, all rows and their sum of a join. One and one of others: more passes are several
    kernels, and a sum passes its gradient on as it is.
    """
    if operator.name in (JOIN, COMBINE):
        return operator.num_passes
    is_gated = operator.num_passes == GATED_PASSES and not operator.name.endswith(LINEAR)
    return GATED_PASSES if is_gated else 2


def _exchanged_bytes(layer: Layer, setting: Setting) -> float:
    """Return the bytes of what distributed experts read, as it leaves ranks and as it arrives."""
    if all(operator.name != COMBINE for operator in layer.operators):  # experts are not distributed
        return 0.0
    grouped = with_grouped_experts(layer).layer.operators
    first = next(operator for operator in grouped if is_of_expert(operator))
    assert isinstance(first, Matmul), "an MLP begins with a product"
    return 2 * setting.tokens(first) * first.in_features * setting.element_bytes


def _keys_of_others(operator: Attention, setting: Setting) -> tuple[float, float]:
    """Return the bytes of keys and values that an attention gets from other ranks, and with their gradients.

    Gathered by heads: keys and values of all ranks, of the heads that compute and of those that come next;
    backward also their gradients, and float32 sums of these, as many in flight. In a ring: blocks of one
    rank, all heads. All to all: queries, keys, values and output with whole rows of some heads.
    """
    grid, size, wide = setting.grid, setting.element_bytes, setting.wide_bytes
    if grid.cp == 1 or operator.keys is not None or operator.num_keys is not None:
        return 0.0, 0.0
    tokens, num_kv_heads = setting.tokens(operator), operator.num_kv_heads / grid.tp
    if setting.key_exchange is KeyExchange.ALL_TO_ALL:
        moved = tokens * _attention_width(operator, setting) * size
        return moved, moved
    if setting.key_exchange is KeyExchange.RING:
        block = 2 * tokens * num_kv_heads * operator.head_dim
        return IN_FLIGHT * block * size, block * (IN_FLIGHT * (size + wide) + size)
    local = max(1, operator.num_heads // grid.tp), max(1, operator.num_kv_heads // grid.tp)
    heads = heads_per_gather(*local, round(tokens))
    chunk = 2 * tokens * grid.cp * heads * operator.head_dim
    count = min(IN_FLIGHT, num_kv_heads / heads)
    return count * chunk * size, chunk * (count * (size + wide) + size)
