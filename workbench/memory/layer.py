"""Bytes that one layer holds on one rank: weights, optimizer state, and what it keeps for its backward."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from workbench.cost.expert_parallel import on_rank
from workbench.cost.recurrence import AnyRecurrence
from workbench.cost.roofline import Grid, Work, operator_tokens
from workbench.float_sum import float_sum
from workbench.memory.adapters import inner_width
from workbench.memory.attended import keys_per_query
from workbench.memory.convolutions import input_width, num_read
from workbench.memory.eager import (
    Kept,
    eager_kept,
    eager_kept_by_operator,
    shared_bytes,
)
from workbench.memory.eager_working import eager_input_working, eager_working
from workbench.memory.fused_working import fused_working
from workbench.memory.grouped_experts import with_grouped_experts
from workbench.memory.indexer import fused_index_bytes
from workbench.memory.megatron import GRADIENT_BYTES, megatron_saved
from workbench.memory.narrow_inputs import keeps_cast, with_kept_inputs
from workbench.memory.recurrence import fused_recurrence_bytes
from workbench.memory.setting import INDEX_BYTES, Setting
from workbench.memory.split import SplitBytes, split_bytes
from workbench.model.block_modules import kept_beside, reads_alike
from workbench.model.diffusion import SHORTCUT
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
from workbench.model.trained import has_trainable
from workbench.model.transformer import RELATIVE_BIAS
from workbench.plan.kernels import Kernels
from workbench.plan.plan import KeyExchange, Settings
from workbench.units import FLOAT32_BYTES

MOST_CACHED = 4096  # layers under settings

# Memory-bound operators whose backward needs nothing of the forward: sums, rotations, means.
LINEAR = (
    "residual",
    "rotary",
    "pool",
    "add_positions",
    "class_token",
    "image_newline",
    "scale",
    RELATIVE_BIAS,
)


class LayerBytes(NamedTuple):
    """What one layer of a stage needs over one microbatch, on one rank.

    Args:
        kept: from its forward to its backward.
        shared: kept once for all layers of a stage.
        forward: alive inside its forward, besides what is kept.
        backward: alive inside its backward, besides what is kept, its output's gradient and all gradients of
            its weights: negative where it never holds so much at once.
        accumulating: the same where gradients of an earlier microbatch exist.
        has_backward: whether it has one.
    """

    kept: Kept
    shared: int
    forward: int
    backward: int
    accumulating: int
    has_backward: bool


@lru_cache(maxsize=MOST_CACHED)
def layer_bytes(layer: Layer, needs: Needs, setting: Setting, kernels: Kernels) -> LayerBytes:
    """Return the account of one layer under any kernels; cached, as planners ask for few layers many times.

    Complexity: O(operators).
    """
    layer = on_rank(layer, setting.work, setting.grid)
    if kernels is Kernels.EAGER:
        layer, num_matrices = with_grouped_experts(layer)
        kept, shared = eager_kept(layer, needs, setting), shared_bytes(layer, needs, setting)
        by_operator = eager_kept_by_operator(layer, needs, setting)
        in_work = eager_working(layer, needs, setting, by_operator, num_matrices)
        return LayerBytes(kept, shared, in_work.forward, in_work.backward, in_work.accumulating, needs.any)
    keeping = with_kept_inputs(layer, setting.products, beside_attention=kernels.is_megatron)
    saved = round(float_sum(_without_recomputed(layer, _saved_by_operator(keeping, needs, setting), setting)))
    working = fused_working(layer, _passing_on(setting, kernels))
    backward = working.backward if needs.any else 0
    entering = (
        setting._replace(divides_tokens=False) if kernels.cuts_sequence else setting
    )  # as messages count it
    kept = Kept(saved, _fused_input_bytes(layer, needs, entering))
    if kernels.is_megatron:
        by_operator = _megatron_saved(keeping, needs, setting, kernels)
        kept = Kept(round(float_sum(_without_recomputed(layer, by_operator, setting))), kept.input_bytes)
    return LayerBytes(kept, 0, working.forward, backward, backward, needs.any)


def _without_recomputed(layer: Layer, saved: Iterable[float], setting: Setting) -> Iterable[float]:
    """Return the saved bytes without what the backward computes again."""
    if not setting.computed_again:
        return saved
    return kept_beside(layer.operators, tuple(saved), setting.computed_again)


def layer_split_bytes(layer: Layer, needs: Needs, setting: Setting, kernels: Kernels) -> SplitBytes:
    """Return what the layer needs where its stage's backward is split into I and W.

    Fused kernels leave the same tensors; any of their operators may have the largest one's working set, and W
    adds to the gradients in place.

    Complexity: O(operators).
    """
    layer = on_rank(layer, setting.work, setting.grid)
    if kernels is Kernels.EAGER:
        layer, num_matrices = with_grouped_experts(layer)
        kept = eager_kept_by_operator(layer, needs, setting)
        working = eager_input_working(layer, needs, setting)
        return split_bytes(layer, needs, setting, kept, working, num_matrices)
    keeping = with_kept_inputs(layer, setting.products, beside_attention=kernels.is_megatron)
    kept = tuple(_saved_by_operator(keeping, needs, setting))
    if kernels.is_megatron:
        kept = _megatron_saved(keeping, needs, setting, kernels)
    in_work = fused_working(layer, _passing_on(setting, kernels))
    working = (float(in_work.backward),) * len(layer.operators)
    one_each = (1,) * len(layer.operators)
    return split_bytes(layer, needs, setting, kept, working, one_each)._replace(temporary=0)


def _passing_on(setting: Setting, kernels: Kernels) -> Setting:
    """Return the setting in which Megatron's context-parallel ranks pass keys on, as its default is."""
    return setting._replace(key_exchange=KeyExchange.RING) if kernels.is_megatron else setting


def _megatron_saved(layer: Layer, needs: Needs, setting: Setting, kernels: Kernels) -> tuple[float, ...]:
    return megatron_saved(
        layer,
        needs,
        setting,
        stores_scores=kernels.stores_scores,
        cuts_sequence=setting.divides_tokens,
    )


def _fused_input_bytes(layer: Layer, needs: Needs, setting: Setting) -> int:
    """Return the part of the saved bytes that is the layer's input: what its first operator keeps of it."""
    first = layer.operators[:1]
    if layer.kind is LayerKind.EMBED or not first or isinstance(first[0], Attention | Lookup):
        return 0
    if keeps_cast(layer, first[0], setting.products):
        return 0
    alone = replace(layer, operators=first)
    return round(float_sum(_saved_by_operator(alone, needs, setting)))


ADAMW_MOMENTS, MUON_MOMENTS = 2, 1  # per trained parameter


class StateBytes(NamedTuple):
    """Bytes per parameter."""

    weight: int
    gradient: int
    optimizer: int


def state_bytes(
    element_bytes: int,
    kernels: Kernels = Kernels.FUSED,
    wide_bytes: int | None = None,
    num_moments: int = ADAMW_MOMENTS,
) -> StateBytes:
    """Return weight, gradient and optimizer state per trainable parameter; a frozen one has its weight only.

    FUSED: 2-byte weights have a float32 master copy and two float32 moments (Rajbhandari et al.
    2020, "ZeRO", section 3.1: K = 12), wider ones two moments of their own width. EAGER: two
    moments of the weight's own width, as torch's AdamW keeps them. `wide_bytes`: the size of the
    optimizer's elements, if set: gradients, moments, and a copy of narrower weights. Muon has one
    momentum in place of the two moments.
    """
    if wide_bytes is not None:
        copies = num_moments + (wide_bytes != element_bytes)
        return StateBytes(element_bytes, wide_bytes, copies * wide_bytes)
    if kernels.is_megatron:
        master = FLOAT32_BYTES if element_bytes < FLOAT32_BYTES else 0
        return StateBytes(element_bytes, GRADIENT_BYTES, master + num_moments * FLOAT32_BYTES)
    if kernels is Kernels.FUSED and element_bytes < FLOAT32_BYTES:
        return StateBytes(element_bytes, element_bytes, (1 + num_moments) * FLOAT32_BYTES)
    return StateBytes(element_bytes, element_bytes, num_moments * element_bytes)


def state_bytes_of(settings: Settings, num_moments: int = ADAMW_MOMENTS) -> StateBytes:
    """Return `state_bytes` under a plan's or a job's settings."""
    wide = settings.optimizer_precision
    wide_bytes = None if wide is None else wide.num_bytes
    return state_bytes(settings.precision.num_bytes, settings.kernels, wide_bytes, num_moments)


def saved_bytes(layer: Layer, needs: Needs, work: Work, grid: Grid, element_bytes: int) -> int:
    """Return the bytes that a layer keeps from its forward to its backward, on one rank.

    Per operator, whenever any gradient of the layer runs:
      attention: query, key, value, output, and a float32 log-sum-exp a head and query; what an indexer chose;
      recurrence: see `fused_recurrence_bytes`;
      norms and activations: each tensor they read; the loss, logits in float32;
      sums, rotations, means: nothing.
    And only when weight gradients run:
      matmul: its input (a convolution's: each element once), as cast to a narrow format if its product is in
      one, once for adjacent ones that share it, and not again when it is an attention's output that is not
      cast; if its adapter alone is trained, also what is between the adapter's products;
      tables: the indices.
    A layer without gradients keeps nothing.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 4.1. Differs: no dropout masks, no stored scores (FlashAttention), and
    no matmul inputs in frozen layers, whose input gradients need only the weights.

    Complexity: O(operators).
    """
    setting = Setting(work, grid, element_bytes, is_gathered=False)
    return round(float_sum(_saved_by_operator(layer, needs, setting)))


def _saved_by_operator(layer: Layer, needs: Needs, setting: Setting) -> Iterator[float]:
    work, grid, element_bytes = setting.work, setting.grid, setting.element_bytes
    for previous, operator in pairwise((None, *layer.operators)):
        assert operator is not None
        tokens = operator_tokens(operator, work, grid)
        if isinstance(operator, Attention | Recurrence | Pointwise):
            yield tokens * _token_bytes(layer, operator, setting) if needs.any else 0.0
        elif not needs.weight_grad or not has_trainable(layer, operator):
            yield 0.0
        elif isinstance(operator, Lookup):
            yield tokens * INDEX_BYTES
        else:
            width = 0.0
            if not _kept_already(layer, previous, operator, setting):
                width = input_width(layer, operator) / (grid.tp if operator.shard is Shard.ROW else 1)
            yield tokens * (width + inner_width(operator)) * element_bytes


def _token_bytes(layer: Layer, operator: Attention | AnyRecurrence | Pointwise, setting: Setting) -> float:
    """Return the bytes per token that gradients of the layer's input need."""
    grid, element_bytes = setting.grid, setting.element_bytes
    if isinstance(operator, Attention):
        num_kv_heads = operator.num_kv_heads * keys_per_query(layer, operator, setting)
        width = 2 * (operator.num_heads + num_kv_heads) * operator.mean_dim
        own = (width * element_bytes + operator.num_heads * FLOAT32_BYTES) / grid.tp
        return own + fused_index_bytes(operator, setting)
    if isinstance(operator, Recurrence):
        return fused_recurrence_bytes(operator, element_bytes) / grid.tp
    if operator.name.endswith(LINEAR):
        return 0.0
    is_loss = layer.kind is LayerKind.HEAD and not operator.weights
    element_bytes = max(FLOAT32_BYTES, element_bytes) if is_loss else element_bytes
    return operator.width / setting.cut(operator) * num_read(operator) * element_bytes


def _kept_already(layer: Layer, previous: Operator | None, operator: Matmul, setting: Setting) -> bool:
    """Whether the input is kept already: an attention's output, or an input shared with the previous one."""
    if isinstance(previous, Attention):
        return not keeps_cast(layer, operator, setting.products)
    if operator.name in (KV_DOWN, SHORTCUT):  # a UNet's block normalises what its shortcut reads
        return True
    return previous is not None and reads_alike(previous, operator) and has_trainable(layer, previous)
