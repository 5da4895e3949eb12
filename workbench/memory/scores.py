"""Memory of attention that stores its scores: a number for each head and pair of tokens of an item."""

from collections import Counter
from typing import NamedTuple

from workbench.float_sum import float_sum
from workbench.memory.indexer import eager_choice_bytes, eager_chosen_bytes, eager_mask_bytes
from workbench.memory.setting import Setting
from workbench.model.layer import Attention


class WorkingScores(NamedTuple):
    """Working bytes of an attention's scores.

    Args:
        forward: in a forward that keeps nothing.
        beside_kept: besides those that a forward keeps.
        backward: besides those that it kept.
    """

    forward: float
    beside_kept: float
    backward: float


NO_SCORES = WorkingScores(0.0, 0.0, 0.0)
CAPPED = (2, 1, 2)  # copies: in backward the gradient of the softmax and what it becomes
BIASED = (2, 1, 3)
SUNK = (1, 1, 2)  # softmax and its gradient, each made in the memory of the scores


def working_scores(attention: Attention, setting: Setting, *, is_biased: bool) -> WorkingScores:
    """Return the bytes while an attention works on the items of one length, which run together.

    With sinks a mask of one byte a pair of tokens, which the items share, is made by either pass.

    Args:
        attention: that is capped, has sinks or chooses keys; else nothing is stored, unless
        is_biased: a learned number is added to each score.
    """
    if attention.top_k is not None:
        return _chosen(attention, setting)
    if not (attention.has_sinks or attention.is_capped or is_biased):
        return NO_SCORES
    counts = Counter(setting.lengths)
    bytes_of_pair = attention.num_heads / setting.grid.tp * setting.wide_bytes
    scores = max((num * n * n for n, num in counts.items()), default=0) * bytes_of_pair
    mask = float(max(counts, default=0) ** 2) if attention.has_sinks else 0.0
    copies = SUNK if attention.has_sinks else CAPPED if attention.is_capped else BIASED
    return WorkingScores(*(number * scores + mask for number in copies))


def _chosen(attention: Attention, setting: Setting) -> WorkingScores:
    """Those of chosen keys: while they are chosen, or while what is chosen becomes a mask of numbers."""
    choosing, mask = eager_choice_bytes(attention, setting), eager_mask_bytes(attention, setting)
    chosen = eager_chosen_bytes(attention, setting)
    return WorkingScores(max(choosing, chosen + mask), max(choosing - mask, chosen), 0.0)


def score_bytes(attention: Attention, setting: Setting) -> float:
    """Return the bytes of a float32 or wider number per head and pair of tokens of an item."""
    pairs = attention.num_heads / setting.grid.tp * float_sum(n * n for n in setting.lengths)
    return pairs * setting.wide_bytes


def shared_scores(attention: Attention, setting: Setting, *, copies: int) -> float:
    """Return bytes per token of `copies` of the scores, and of keys and values, where ranks share tokens."""
    if setting.grid.cp == 1:
        return 0.0
    scores = attention.num_heads // attention.num_kv_heads * setting.work.tokens(attention.tokens)
    gathered = 8 * attention.head_dim * setting.grid.cp
    return float((copies * scores + gathered) * setting.wide_bytes)


def attention_widths(attention: Attention) -> tuple[int, int]:
    """Return the width of queries, and of queries, keys and values together."""
    queries = attention.num_heads * attention.head_dim
    return queries, queries + 2 * attention.num_kv_heads * attention.head_dim


def gradient_width(attention: Attention, setting: Setting) -> float:
    """Return bytes per token of an attention's gradients, while most are there.

    In a fused kernel those of queries, keys and values, and three tensors as wide as queries. A capped one
    has most while the gradients of scores are there, and that of the values replaces their copy. With sinks:
    the three, those of keys before groups of heads are summed, and that of the output; all but the last are
    wide, and so are copies of narrower queries, keys, values, output and its gradient.
    """
    queries, both = attention_widths(attention)
    size, wide = setting.element_bytes, setting.wide_bytes
    if attention.is_capped:
        return 0.0
    if not attention.has_sinks:
        return (both + 3 * queries) * size / setting.grid.tp
    copies = (both + 2 * queries) * wide if size < wide else 0
    return ((both + queries) * wide + queries * size + copies) / setting.grid.tp
