"""Attention of queries over a part of the keys: merged with others, or left out where it is empty."""

import torch
from torch import Tensor

from runtime.models.attention_mask import AttentionMask, uses_kernels
from runtime.models.dense_attention import weights_of
from workbench.masks.tiles import classify

# Shape suffixes: T = queries, H = query heads, D = head width.


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine output and log-sum-exp of the same queries over two sets of keys."""
    lse_HT = torch.logaddexp(one[1], other[1])
    y_HTD = torch.zeros_like(one[0])
    for part_HTD, part_HT in (one, other):
        y_HTD += part_HTD * weights_of(part_HT, lse_HT)[..., None]
    return y_HTD, lse_HT


def is_empty(mask: AttentionMask) -> bool:
    """Whether no query sees any key; on a GPU without T x S memory."""
    if uses_kernels(mask.device):
        return not len(classify(mask.queries, mask.keys, mask.block, mask.block).columns)
    return not bool(mask.dense().any())
