"""What a bitfield mask is to the kernels: per-token words, positions and segments as tensors."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

# Shape suffixes: T = tokens of one side, Q = queries, K = keys.

EVERYTHING = torch.iinfo(torch.int32).max
NARROW_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class TokenFields:
    """The eight facts about every token of one side, each [T].

    Args:
        allow: int64 bits of the groups the token may attend to (a uint64 word, reinterpreted).
        own: int64 bits of the groups it belongs to.
        causal: bool, it sees only keys at its own position or before.
        segment: int32 packed document; -1 is padding, which neither attends nor is attended to.
        position: int32 place in the packed sequence. Any order of tokens is fine: only this counts.
        first: int32 lowest key position it sees.
        always: int64 bits of key groups it sees even below `first`.
        last: int32 highest key position it sees; None: no limit.
    """

    allow: Tensor
    own: Tensor
    causal: Tensor
    segment: Tensor
    position: Tensor
    first: Tensor
    always: Tensor
    last: Tensor = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.last is None:
            object.__setattr__(self, "last", torch.full_like(self.position, EVERYTHING))
        want = {"allow": torch.int64, "own": torch.int64, "always": torch.int64, "causal": torch.bool}
        for each in fields(self):
            value: Tensor = getattr(self, each.name)
            dtype = want.get(each.name, torch.int32)
            if value.shape != self.allow.shape or value.ndim != 1:
                raise ValueError(
                    f"{each.name}: want shape {tuple(self.allow.shape)} like allow, got {tuple(value.shape)}"
                )
            if value.dtype != dtype or value.device != self.allow.device:
                raise ValueError(
                    f"{each.name}: want {dtype} on {self.allow.device}, got {value.dtype} on {value.device}"
                )

    def __len__(self) -> int:
        return len(self.allow)

    def take(self, index: Tensor) -> "TokenFields":
        """The tokens at `index`, in that order."""
        return TokenFields(*(getattr(self, each.name)[index] for each in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class KernelMask:
    """A mask with everything folded that the kernels need not ask per pair.

    A query attends to a key where the segments are equal, a bit of `allow` meets a bit of `own`,
    and `first <= place <= last`; below `first` a bit of `always` that meets `own` will do. Places
    are positions moved apart by segment, so `lowest <= place <= last` implies equal segments and no
    segment is loaded for a key.

    Args:
        query_words: [2, Q] int64, or int32 where 32 bits hold every bit in use: `allow` and
            `always`; 0 on padding.
        query_limits: [3, Q] int32: `last` (at most the query's own place if it is causal), segment, `first`.
        query_lowest: [Q] int32: a place below every key of the query's segment, above all before it.
        key_words: [K] of the dtype of `query_words`: `own`; 0 on padding.
        key_places: [2, K] int32: place, segment.
        has_window: whether any `first` may hide a key of the query's own segment; without it two
            tests are left out.
        has_segments: whether there is more than one segment; else that test is left out.
    """

    query_words: Tensor
    query_limits: Tensor
    query_lowest: Tensor
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

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As kernels take them."""
        return self.query_words, self.query_limits, self.query_lowest, self.key_words, self.key_places

    def to(self, device: torch.device | str) -> "KernelMask":
        """The same mask on another device."""
        moved = (tensor.to(device) for tensor in self.tensors)
        return KernelMask(*moved, self.has_window, self.has_segments)


def kernel_mask(queries: TokenFields, keys: TokenFields) -> KernelMask:
    """Fold the fields of both sides. One read back to the host, once per mask.

    Raises:
        ValueError: the sides are on different devices.
    """
    if queries.allow.device != keys.allow.device:
        raise ValueError(f"queries are on {queries.allow.device}, keys on {keys.allow.device}")
    allow_Q, always_Q = ((word * (queries.segment >= 0)) for word in (queries.allow, queries.always))
    own_K = keys.own * (keys.segment >= 0)
    facts = _facts(queries, keys, own_K)
    words = [_narrow(word, facts.used_bits) for word in (allow_Q, always_Q, own_K)]
    last_Q, first_Q, lowest_Q, place_K = _places(queries, keys, facts)
    return KernelMask(
        query_words=torch.stack(words[:2]),
        query_limits=torch.stack([last_Q, queries.segment, first_Q]),
        query_lowest=lowest_Q,
        key_words=words[2],
        key_places=torch.stack([place_K, keys.segment]),
        has_window=facts.has_window,
        has_segments=facts.has_segments,
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the host must know: bits that some key owns, tests to leave out, ranges of the keys."""

    used_bits: int
    has_window: bool
    has_segments: bool
    least_position: int
    most_position: int
    most_segment: int


def _facts(queries: TokenFields, keys: TokenFields, own_K: Tensor) -> _Facts:
    if not len(queries) or not len(keys):
        return _Facts(0, *(False, False), 0, 0, 0)
    segment = torch.cat([queries.segment, keys.segment])
    lowest = torch.where(segment >= 0, segment, EVERYTHING).min()
    facts = torch.stack(
        [
            _any_bit(own_K),
            _hides(queries, keys).any(),
            segment.max() > lowest,
            keys.position.min(),
            keys.position.max(),
            segment.max(),
        ]
    )
    used, has_window, has_segments, *ranges = facts.tolist()
    return _Facts(used, bool(has_window), bool(has_segments), *ranges)


def _hides(queries: TokenFields, keys: TokenFields) -> Tensor:
    """bool [Q]: whether `first` may hide a key of the query's own segment.

    The lowest position of every segment, by scattering into as many slots as there are keys: segments
    that share a slot can only make an answer True that need not be.
    """
    num_slots = len(keys)
    position_K = torch.where(keys.segment >= 0, keys.position, EVERYTHING)
    least_S = torch.full((num_slots,), EVERYTHING, dtype=torch.int32, device=position_K.device)
    least_S.scatter_reduce_(0, keys.segment.long() % num_slots, position_K, "amin")
    least_Q = least_S[queries.segment.long() % num_slots]
    return (queries.segment >= 0) & (queries.first > least_Q) & (least_Q < EVERYTHING)


def _places(queries: TokenFields, keys: TokenFields, facts: _Facts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`last`, `first` and `lowest` of the queries and the places of the keys, all int32.

    Segment s takes the places from s x span on. Where those do not fit into 32 bits, the keys' ranks
    among all keys by segment and position do as well, for the price of a sort.
    """
    below = facts.least_position - 1
    span = facts.most_position + 2 - below

    def place(position_T: Tensor, segment_T: Tensor) -> Tensor:
        relative = position_T.clamp(below, facts.most_position + 1).long() - below
        return segment_T.clamp(min=0).long() * span + relative

    last_Q = torch.where(queries.causal, queries.position, EVERYTHING).minimum(queries.last)
    places = [place(x, queries.segment) for x in (last_Q, queries.first, torch.full_like(last_Q, below))]
    place_K = place(keys.position, keys.segment)
    if (facts.most_segment + 1) * span <= EVERYTHING:
        last_Q, first_Q, lowest_Q, place_K = (x.to(torch.int32) for x in (*places, place_K))
        return last_Q, first_Q, lowest_Q, place_K
    order = place_K.unique()
    first_Q, lowest_Q, place_K = (
        torch.searchsorted(order, x, out_int32=True) for x in (*places[1:], place_K)
    )
    return torch.searchsorted(order, places[0], out_int32=True, right=True) - 1, first_Q, lowest_Q, place_K


def _any_bit(word_T: Tensor) -> Tensor:
    """The OR of all words, by halving."""
    while len(word_T) > 1:
        half = len(word_T) // 2
        word_T = torch.cat([word_T[:half] | word_T[half : 2 * half], word_T[2 * half :]])
    return word_T[0]


def _narrow(word_T: Tensor, used: int) -> Tensor:
    """int32 where that is enough, else as it is: half the registers of the mask test.

    A bit that no key owns decides nothing, so at most 32 bits in use are squeezed together.
    """
    bits = [bit for bit in range(64) if used >> bit & 1]
    if len(bits) > NARROW_BITS:
        return word_T
    if not bits or bits[-1] < NARROW_BITS:
        return (word_T & used).to(torch.int32)
    squeezed = torch.zeros_like(word_T)
    for place, bit in enumerate(bits):
        squeezed |= ((word_T >> bit) & 1) << place
    return squeezed.to(torch.int32)
