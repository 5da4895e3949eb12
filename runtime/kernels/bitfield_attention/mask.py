"""What a bitfield mask is to the kernels: per-token words, positions and segments as tensors."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

# Shape suffixes: T = tokens of one side, Q = queries, K = keys.

PADDING = -1
EVERYTHING = torch.iinfo(torch.int32).max
MOST_NARROW_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class TokenFields:
    """The seven facts about every token of one side, each [T].

    Args:
        allow: int64 bits of the groups the token may attend to (a uint64 word, reinterpreted).
        own: int64 bits of the groups it belongs to.
        causal: bool, it sees only keys at its own position or before.
        segment: int32 packed document; -1 is padding, which neither attends nor is attended to.
        position: int32 place in the packed sequence. Any order of tokens is fine: only this counts.
        first: int32 lowest key position it sees.
        always: int64 bits of key groups it sees even below `first`.
    """

    allow: Tensor
    own: Tensor
    causal: Tensor
    segment: Tensor
    position: Tensor
    first: Tensor
    always: Tensor

    def __post_init__(self) -> None:
        want = {"allow": torch.int64, "own": torch.int64, "always": torch.int64, "causal": torch.bool}
        for field in fields(self):
            value: Tensor = getattr(self, field.name)
            dtype = want.get(field.name, torch.int32)
            if value.shape != self.allow.shape or value.ndim != 1:
                raise ValueError(
                    f"{field.name}: want shape {tuple(self.allow.shape)} like allow, got {tuple(value.shape)}"
                )
            if value.dtype != dtype or value.device != self.allow.device:
                raise ValueError(
                    f"{field.name}: want {dtype} on {self.allow.device}, got {value.dtype} on {value.device}"
                )

    def __len__(self) -> int:
        return len(self.allow)

    def take(self, index: Tensor) -> "TokenFields":
        """The tokens at `index`, in that order."""
        return TokenFields(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class KernelMask:
    """A mask with everything folded that the kernels need not ask per pair.

    A query attends to a key where the segments are equal, a bit of `allow` meets a bit of `own`,
    and `first <= position <= last`; below `first` a bit of `always` that meets `own` will do.

    Args:
        query_words: [2, Q] int64, or int32 where 32 bits hold every bit in use: `allow` and
            `always`; 0 on padding.
        query_limits: [3, Q] int32: `last` (the query's own position if it is causal), segment, `first`.
        key_words: [K] of the dtype of `query_words`: `own`; 0 on padding.
        key_places: [2, K] int32: position, segment.
        has_window: whether any `first` hides a key; without it two tests are left out.
        has_segments: whether there is more than one segment; else that test is left out.
    """

    query_words: Tensor
    query_limits: Tensor
    key_words: Tensor
    key_places: Tensor
    has_window: bool
    has_segments: bool

    @property
    def num_queries(self) -> int:
        return self.query_words.shape[1]

    @property
    def num_keys(self) -> int:
        return len(self.key_words)

    @property
    def device(self) -> torch.device:
        return self.key_words.device


def kernel_mask(queries: TokenFields, keys: TokenFields) -> KernelMask:
    """Fold the fields of both sides. Reads three scalars back to the host, once per mask.

    Raises:
        ValueError: the sides are on different devices.
    """
    if queries.allow.device != keys.allow.device:
        raise ValueError(f"queries are on {queries.allow.device}, keys on {keys.allow.device}")
    real_Q, real_K = queries.segment >= 0, keys.segment >= 0
    allow, always, own = _narrow(queries.allow * real_Q, queries.always * real_Q, keys.own * real_K)
    real_segments = torch.cat([queries.segment[real_Q], keys.segment[real_K]])
    last_Q = torch.where(queries.causal, queries.position, EVERYTHING)
    return KernelMask(
        query_words=torch.stack([allow, always]),
        query_limits=torch.stack([last_Q, queries.segment, queries.first]),
        key_words=own,
        key_places=torch.stack([keys.position, keys.segment]),
        has_window=len(keys) > 0 and bool((queries.first > keys.position.min()).any()),
        has_segments=len(real_segments) > 0 and bool(real_segments.min() != real_segments.max()),
    )


def _narrow(allow_Q: Tensor, always_Q: Tensor, own_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The words as int32 with unused bits squeezed out, where that is enough; else as they are.

    A bit that no key owns decides nothing. Half the register traffic of int64 words.
    """
    places = torch.arange(64, device=own_K.device)
    used = ((own_K[:, None] >> places) & 1).any(0).nonzero().squeeze(1).tolist()
    if len(used) > MOST_NARROW_BITS:
        return allow_Q, always_Q, own_K
    return tuple(_squeeze(word, used) for word in (allow_Q, always_Q, own_K))  # type: ignore[return-value]


def _squeeze(word_T: Tensor, used: list[int]) -> Tensor:
    squeezed = torch.zeros_like(word_T)
    for place, bit in enumerate(used):
        squeezed |= ((word_T >> bit) & 1) << place
    low = squeezed & 0xFFFFFFFF  # two's complement: bit 31 becomes the sign
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)
