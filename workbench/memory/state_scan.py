"""Bytes of a state-space scan: in fused kernels, and as transformers writes it in PyTorch."""

from collections import Counter
from math import ceil

from workbench.float_sum import float_sum
from workbench.memory.delta_rule import RuleWorking
from workbench.memory.setting import Setting
from workbench.model.layer import Layer, Pointwise, StateScan
from workbench.units import FLOAT32_BYTES


def fused_scan_bytes(scan: StateScan, element_bytes: int) -> int:
    """Bytes per token that fused kernels keep for their backward.

    The convolution's input, values, keys and queries, steps, and float32 decays. The output is kept by the
    norm that reads it.

    Source: `MambaChunkScanCombinedFn` of mamba_ssm, `mamba_ssm/ops/triton/ssd_combined.py`.
    """
    return (2 * scan.width + scan.num_heads) * element_bytes + scan.num_heads * FLOAT32_BYTES


def eager_scan_bytes(scan: StateScan, setting: Setting, *, is_trained: bool) -> float:
    """Bytes that autograd keeps of `mamba2_chunk_scan` and the convolution before it, on one rank.

    In the type of activations: all that the first matmul gave, of which the convolution reads a part; its
    output before its activation, with the tokens that it pads; steps before and after their activation. In
    float32 or wider, per head: values and steps, whose product enters the scan (in float32 views of the
    convolution's result), and where weights are trained padded values and, unless that is the same tensor,
    steps again. Of whole chunks per head: scores as they are, their decays and both together; keys as three
    products read them, queries as two do; values as two products read them, what the states give, and the
    output; two exponentials of decays; per chunk its state, the states before it and decays between chunks.
    Items of one length run together, under the masks of a chunk and of its chunks.

    Complexity: O(items).
    """
    groups = Counter(setting.lengths).items()
    heads_bytes = float_sum(_group_bytes(scan, setting, length, num, is_trained) for length, num in groups)
    masks = sum(2 * scan.chunk**2 + 2 * (ceil(length / scan.chunk) + 1) ** 2 for length, _ in groups)
    return heads_bytes / setting.grid.tp + masks


def _group_bytes(scan: StateScan, setting: Setting, length: int, num_items: int, is_trained: bool) -> float:  # noqa: FBT001
    """Return the bytes of so many items of one length."""
    size, wide, heads = setting.element_bytes, setting.wide_bytes, scan.num_heads
    num_chunks = ceil(length / scan.chunk)
    is_wide, padded = size == wide, num_chunks * scan.chunk
    values, states = scan.value_width, heads * scan.key_dim * scan.value_dim
    before = (2 * length + scan.kernel - 1) * scan.width + length * (values + 3 * heads)
    entering = length * ((scan.width if is_wide else values) + heads)
    if is_trained:
        entering += padded * values + (0 if is_wide else length * heads)
    copies = 1 if num_items * num_chunks > 1 else 0  # where there is one chunk in all, some are views
    of_head = 3 * scan.chunk + (3 + 2 * copies) * scan.key_dim + (3 + copies) * scan.value_dim + 2
    between = (num_chunks + 1) ** 2 * heads + (2 * num_chunks + 2 - copies) * states
    numbers = entering + padded * heads * of_head + between
    return num_items * (before * size + numbers * wide) + (1 + is_trained) * heads * wide


def eager_norm_bytes(layer: Layer, norm: Pointwise, setting: Setting, *, is_trained: bool) -> float:
    """Bytes per token that autograd keeps of the norm behind a scan, which keeps its output itself.

    In float32 or wider: the activated gate, its product with the output, a number of each group, where
    trained what is scaled, and a copy of the gate where it is widened.
    """
    num_groups = sum(scan.num_key_heads for scan in layer.operators if isinstance(scan, StateScan))
    tensors = 2 + is_trained + (setting.element_bytes < setting.wide_bytes)
    return (tensors * norm.width + num_groups) * setting.wide_bytes


def eager_scan_working(scan: StateScan, setting: Setting) -> RuleWorking:
    """Return the bytes of a scan's tensors in work.

    Around it what the first matmul gave, and the convolution's result. Inside, by whole chunks and heads,
    with the items of one length at a time: a forward that keeps nothing has three tensors of scores; at its
    end three as wide as keys (keys, queries, keys with decays), seven as wide as values and the states, or
    before that four, four, and the states twice. Of these a forward does not keep two as wide as keys, five
    as wide as values, and the states. At the peak of a backward three gradients exist: of queries, of the
    output and of the states.

    Complexity: O(items).
    """
    sizes = [_chunk_sizes(scan, length, num) for length, num in Counter(setting.lengths).items()]
    scores, keys, values, states = map(max, zip(*sizes, strict=True)) if sizes else (0, 0, 0, 0)
    around = sum(setting.lengths) * (2 * scan.width + scan.value_width + scan.num_heads)
    most = 3 * scores + max(3 * keys + 7 * values + states, 4 * (keys + values) + 2 * states)
    inside = (most, 2 * keys + 5 * values + states, keys + values + states)
    forward, beside_kept, backward = (num * setting.wide_bytes / setting.grid.tp for num in inside)
    return RuleWorking(forward + around * setting.element_bytes / setting.grid.tp, beside_kept, backward)


def _chunk_sizes(scan: StateScan, length: int, num_items: int) -> tuple[int, int, int, int]:
    """Return the numbers in a tensor of scores, keys, values and states of so many items of one length."""
    num_chunks = ceil(length / scan.chunk)
    rows = num_items * num_chunks * scan.chunk * scan.num_heads
    states = num_items * (num_chunks + 1) * scan.num_heads * scan.key_dim * scan.value_dim
    return rows * scan.chunk, rows * scan.key_dim, rows * scan.value_dim, states
