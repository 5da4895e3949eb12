"""Bytes of a gated delta rule: in fused kernels, and as transformers writes it in PyTorch."""

from collections import Counter
from math import ceil
from typing import NamedTuple

from workbench.cost.delta_rule import CHUNK
from workbench.float_sum import float_sum
from workbench.memory.setting import Setting
from workbench.model.layer import DeltaRule
from workbench.units import FLOAT32_BYTES


def fused_rule_bytes(rule: DeltaRule, element_bytes: int) -> int:
    """Bytes per token that fused kernels keep for their backward.

    The convolution's input, queries, keys and values, per head of values the solved scores of a chunk, and
    float32 numbers: a decay and a step per head, a norm per query and key.

    Source: `ChunkGatedDeltaRuleFunction` of flash-linear-attention, `fla/ops/gated_delta_rule/chunk.py`.
    """
    tensors = 2 * rule.width + rule.num_heads * CHUNK
    return tensors * element_bytes + 2 * (rule.num_heads + rule.num_key_heads) * FLOAT32_BYTES


def eager_rule_bytes(rule: DeltaRule, setting: Setting, *, is_trained: bool) -> float:
    """Bytes that autograd keeps of `torch_chunk_gated_delta_rule` and what surrounds it, on one rank.

    In the type of activations: input and output of the convolution (before its activation, with the tokens
    that it pads) and the steps. In float32 or wider, per head of values: a number of the decay, and another
    where it is trained; queries and keys before their norms, and the norms. Of whole chunks: the steps,
    values, keys, keys times steps, queries, both products of scores before and after decays with the decays
    themselves, what the solve gives, the corrected values, three exponentials of decays, keys as the state
    reads them and, from the second chunk on, queries too; and per chunk its state. Where items are whole
    chunks of float32 or wider, and there are several, torch copies four tensors for its products that else
    are views. Items of one length run together, under one mask of a chunk.

    Complexity: O(items).
    """
    groups = Counter(setting.lengths).items()
    heads_bytes = float_sum(_group_bytes(rule, setting, length, num) for length, num in groups)
    if is_trained:
        decays = sum(setting.lengths) + 2 * len(groups)
        heads_bytes += decays * rule.num_heads * setting.wide_bytes
    return heads_bytes / setting.grid.tp + len(groups) * CHUNK**2


def _group_bytes(rule: DeltaRule, setting: Setting, length: int, num_items: int) -> float:
    """Return the bytes of so many items of one length, of what is kept with frozen weights too."""
    size, wide, heads = setting.element_bytes, setting.wide_bytes, rule.num_heads
    keys, values, num_chunks = rule.key_dim, rule.value_dim, ceil(length / CHUNK)
    is_wide, padded = size == wide, num_chunks * CHUNK
    before = (2 * length + rule.kernel - 1) * rule.width + length * heads
    entering = 2 * length * heads * (keys + 1)
    if is_wide and rule.num_heads == rule.num_key_heads:  # views of the convolution's result
        entering = length * rule.width + 2 * length * heads
    is_copied = is_wide and length == padded and num_items * num_chunks > 1
    key_tensors = 5 + 4 * is_copied + (num_chunks > 1)
    per_token = 3 * values + key_tensors * keys + 5 * CHUNK + 4
    states = num_chunks * (keys * values + 1)
    numbers = length * heads + entering + heads * (padded * per_token + states)
    return num_items * (before * size + numbers * wide)


class RuleWorking(NamedTuple):
    """Bytes in work inside a rule as transformers writes it, on one rank.

    Args:
        forward: of a forward that keeps nothing: all that is alive at once.
        beside_kept: of a forward besides what it keeps.
        backward: gradients, and what they are made of.
    """

    forward: float
    beside_kept: float
    backward: float


def eager_rule_working(rule: DeltaRule, setting: Setting) -> RuleWorking:
    """Return the bytes of a rule's tensors in work.

    Around it: the convolution's result and the gates that the norm behind the rule reads. Inside, by whole
    chunks and heads of values: a forward that keeps nothing has queries, keys, keys times steps (with and
    without decays) and what the solve gives for keys; values, values times steps, what the solve gives for
    values, and the output; decays and two products of scores. Of these a forward does not keep keys times
    steps and decays, values times steps and the output. A backward has gradients of three tensors as wide as
    keys, of three as wide as values, and of two with the scores of a chunk.

    Complexity: O(items).
    """
    tokens = sum(setting.lengths)
    padded = sum(ceil(length / CHUNK) * CHUNK for length in setting.lengths)
    keys, values, heads = rule.key_dim, rule.value_dim, rule.num_heads
    around = tokens * (rule.width + rule.value_width) * setting.element_bytes
    chunked = padded * heads * setting.wide_bytes
    return RuleWorking(
        *(
            num_bytes / setting.grid.tp
            for num_bytes in (
                around + chunked * (5 * keys + 4 * values + 3 * CHUNK),
                around + chunked * (keys + 2 * values),
                around + chunked * (3 * keys + 3 * values + 2 * CHUNK),
            )
        )
    )
