"""Which tiles of a mask hold work, from per-block summaries on the mask's own device."""

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.mask import EVERYTHING, KernelMask

# Shape suffixes: T = tokens of one side, R = query blocks, C = key blocks, N = tiles that hold work.

PARTIAL, FULL = 1, 2


def summary_tiles(mask: KernelMask, block_q: int, block_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row offsets [R+1] int64, columns [N] int32 and kinds [N] uint8 of tiles that may hold work.

    Safe, not exact: a tile is FULL only if every pair attends and left out only if none does; what
    the summaries cannot decide is PARTIAL. A few dozen launches, no loop over tokens and no T x T
    mask, so it also suits a mask that is made anew for every step.

    Complexity: O(T + R C) time and space.
    """
    q, k = _QuerySummary(mask, block_q), _KeySummary(mask, block_k)
    some = (q.any_allow[:, None] & k.any_own) != 0
    some &= (q.least_segment[:, None] <= k.most_segment) & (k.least_segment <= q.most_segment[:, None])
    some &= k.least_position <= q.most_last[:, None]
    full = (q.all_allow[:, None] & k.all_own) != 0
    full &= (q.least_segment == q.most_segment)[:, None] & (k.least_segment == k.most_segment)
    full &= q.least_segment[:, None] == k.least_segment
    full &= k.most_position <= q.least_last[:, None]
    if mask.has_window:
        some &= (k.most_position >= q.least_first[:, None]) | ((q.any_always[:, None] & k.any_own) != 0)
        full &= (k.least_position >= q.most_first[:, None]) | ((q.all_always[:, None] & k.all_own) != 0)
    rows, columns = torch.nonzero(some, as_tuple=True)
    kinds = torch.where(full[rows, columns], FULL, PARTIAL).to(torch.uint8)
    offsets = torch.zeros(len(some) + 1, dtype=torch.int64, device=some.device)
    offsets[1:] = some.sum(1).cumsum(0)
    return offsets, columns.to(torch.int32), kinds


class _QuerySummary:
    """What is true of some, and of all, queries of each block."""

    def __init__(self, mask: KernelMask, block: int) -> None:
        allow, always = mask.query_words
        last, segment, first = mask.query_limits
        self.any_allow, self.all_allow = _any_bits(allow, block), _all_bits(allow, block)
        self.any_always, self.all_always = _any_bits(always, block), _all_bits(always, block)
        self.least_segment, self.most_segment = _range(segment, block)
        self.least_last, self.most_last = _range(last, block)
        self.least_first, self.most_first = _range(first, block)


class _KeySummary:
    """What is true of some, and of all, keys of each block."""

    def __init__(self, mask: KernelMask, block: int) -> None:
        position, segment = mask.key_places
        self.any_own, self.all_own = _any_bits(mask.key_words, block), _all_bits(mask.key_words, block)
        self.least_segment, self.most_segment = _range(segment, block)
        self.least_position, self.most_position = _range(position, block)


def _blocks(x_T: Tensor, block: int, fill: int) -> Tensor:
    short = -len(x_T) % block
    return torch.nn.functional.pad(x_T, (0, short), value=fill).view(-1, block)


def _range(x_T: Tensor, block: int) -> tuple[Tensor, Tensor]:
    least = _blocks(x_T, block, EVERYTHING).amin(1)
    return least, _blocks(x_T, block, -EVERYTHING - 1).amax(1)


def _any_bits(word_T: Tensor, block: int) -> Tensor:
    """[blocks] OR of the words of each block, by halving."""
    words = _blocks(word_T, block, 0)
    while words.shape[1] > 1:
        half = words.shape[1] // 2
        words = words[:, :half] | words[:, half:]
    return words[:, 0]


def _all_bits(word_T: Tensor, block: int) -> Tensor:
    """[blocks] AND of the words of each block; missing tokens at the end do not count."""
    return ~_any_bits(~word_T, block)
