"""Memory of attention to chosen keys: scores of all pairs while keys are chosen, and what remains of them."""

from collections import Counter
from collections.abc import Iterable

from workbench.cost.indexer import INDEX_BYTES
from workbench.memory.setting import Setting
from workbench.model.layer import Attention, Layer
from workbench.units import FLOAT32_BYTES

SORTED_INDEX_BYTES = 8  # of a chosen key, as torch returns it


def fused_index_bytes(attention: Attention, setting: Setting) -> float:
    """Bytes per query that fused kernels keep: the chosen keys, once for all layers that read them."""
    if attention.top_k is None or attention.indexer is None:
        return 0.0
    return float(min(attention.top_k, max(setting.lengths, default=attention.top_k)) * INDEX_BYTES)


def fused_score_bytes(attention: Attention, setting: Setting) -> float:
    """Bytes of the scores of the longest item, summed over heads, while its keys are chosen."""
    if attention.indexer is None:
        return 0.0
    return float(max(setting.lengths, default=0)) ** 2 * FLOAT32_BYTES


def eager_mask_bytes(attention: Attention, setting: Setting) -> float:
    """Bytes that an attention keeps of a mask of its own, as a number for every pair of tokens of an item.

    Where keys are chosen, every item has one; of a window shorter than they are, all items of one length.
    """
    lengths, size = setting.lengths, float(setting.element_bytes)
    if attention.top_k is not None:
        return sum(n * n for n in lengths) * size
    window = max(lengths, default=0) if attention.window is None else attention.window
    return sum(n * n for n in set(lengths) if n > window) * size


def eager_chosen_bytes(attention: Attention, setting: Setting) -> float:
    """Bytes of whether each token of an item attends to each other: one a pair, unless others read it."""
    indexer = attention.indexer
    return 0.0 if indexer is None or indexer.is_shared else _pairs_bytes(setting)


def stage_choice_bytes(layers: Iterable[Layer], setting: Setting) -> int:
    """Bytes of what indexers of a stage chose, where its later layers read it, too."""
    attentions = (op for layer in layers for op in layer.operators if isinstance(op, Attention))
    num_shared = sum(op.indexer is not None and op.indexer.is_shared for op in attentions)
    return round(num_shared * _pairs_bytes(setting))


def _pairs_bytes(setting: Setting) -> float:
    return float(sum(n * n for n in setting.lengths))


def eager_choice_bytes(attention: Attention, setting: Setting) -> float:
    """Bytes in work while the runtime chooses keys, of the items of one length together.

    Scores so far and those of the next head, or scores, the best of them and their keys; what is chosen, and
    the causal mask; queries and keys, as wide numbers, turned and not.
    """
    if attention.indexer is None:
        return 0.0
    counts, wide = Counter(setting.lengths), setting.wide_bytes
    pairs = max((num * n * n for n, num in counts.items()), default=0)
    best = max((num * n * min(n, attention.top_k or n) for n, num in counts.items()), default=0)
    scores = pairs * wide + max(pairs * wide, best * (wide + SORTED_INDEX_BYTES))
    indexer = attention.indexer
    turned = 3 * setting.tokens(attention) * (indexer.num_heads + 1) * indexer.head_dim * wide
    return eager_chosen_bytes(attention, setting) + scores + turned + float(max(counts, default=0) ** 2)
