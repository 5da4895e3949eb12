"""Attention masks specified per token; only `dense` ever builds a T x T mask.

The specification. A mask is two `Bitfield`s, one of the queries and one of the keys (usually the same).
Query q attends to key k if all four conditions hold:

1. segment[q] == segment[k] and segment[q] >= 0: packed documents do not see each other, and padding
   (segment -1) neither sees nor is seen;
2. allow[q] & own[k] != 0: some group of k is one that q may see. Bit 0 is text, bits 1 to 60 are the
   modalities; the bits of a token start afresh in every segment;
3. position[k] <= last[q], and position[k] <= position[q] where causal[q];
4. position[k] >= first[q], or always[q] & own[k] != 0: a window, and the keys that stay visible below it.

A token's index in the arrays has no meaning; `position` has, so any subset in any order (`take`) masks as
before. A run that is bidirectional inside and causal outside (an image among text) needs no bit of its own:
its tokens are not causal, and their `last` is the run's end. Positions only order visibility: they are not
those of a rotary embedding. Tokens may share one; a window then sees all of them or none.
`start` has no effect here: a window that a layer later applies to the mask hides nothing from there on, as
transformers' windows cut an image for the text after it and never for the image itself. Neither has the
`last` of a causal token: where a layer applies a window, it sees keys up to there, as images of Gemma 4 are
bidirectional in layers with a window alone.
A query without a key is valid: its row of the mask is empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_MODALITY = 60
TEXT_BIT = 1
PADDING = -1
NO_LIMIT = 2**31 - 1

Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int32]

_WORDS = ("allow", "own", "always")
_LOWEST = {"segment": PADDING}
_LAST_WORD = 2 ** (MAX_MODALITY + 1) - 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bitfield:
    """Nine arrays of length T, copied and read-only; anything integral that fits is accepted.

    Args:
        allow: uint64[T], the groups this token may attend to.
        own: uint64[T], the groups it belongs to.
        causal: bool[T], whether it sees only keys at or below its own position.
        segment: int32[T], the packed document it is part of; -1 is padding.
        position: int32[T], in the packed sequence, >= 0.
        first: int32[T], the lowest key position it sees, >= 0.
        always: uint64[T], the groups whose keys stay visible below `first`, if rules 1 to 3 let them.
        last: int32[T], the highest key position it sees, >= 0; None: no limit.
        start: int32[T], where its item starts, >= 0; None: at itself.

    Raises:
        ValueError: lengths differ, an array is not one-dimensional or not integral, a bit above 60 is
            set, a number is negative or beyond 32 bits.
    """

    allow: Words
    own: Words
    causal: Flags
    segment: Places
    position: Places
    first: Places
    always: Words
    last: Places = field(default=None)  # type: ignore[arg-type]
    start: Places = field(default=None)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        length = len(np.atleast_1d(self.allow))
        if self.last is None:
            object.__setattr__(self, "last", np.full(length, NO_LIMIT, np.int32))
        if self.start is None:
            object.__setattr__(self, "start", self.position)
        for each in fields(self):
            array = _checked(each.name, np.asarray(getattr(self, each.name)), length)
            array.setflags(write=False)
            object.__setattr__(self, each.name, array)

    def __len__(self) -> int:
        return len(self.allow)

    def __repr__(self) -> str:
        return f"Bitfield({len(self)} tokens, {len(np.unique(self.segment[self.segment >= 0]))} segments)"

    @property
    def opens_in_windows(self) -> Flags:
        """bool[T], whether a token is causal except in layers with a window."""
        opens: Flags = self.causal & (self.last < NO_LIMIT)
        return opens

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """(name, array) of the nine fields, in the order above."""
        return ((each.name, getattr(self, each.name)) for each in fields(self))

    def take(self, indices: npt.ArrayLike) -> "Bitfield":
        """The tokens at `indices`, in that order: a rank's share, a permutation.

        Raises:
            ValueError: an index is not an integer in [0, T).
        """
        chosen = np.atleast_1d(np.asarray(indices))
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise ValueError(f"indices must be one-dimensional integers, got {chosen.dtype}{chosen.shape}")
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(self)):
            wrong = chosen[(chosen < 0) | (chosen >= len(self))][0]
            raise ValueError(f"index {wrong}: want one of the {len(self)} tokens, 0 to {len(self) - 1}")
        return Bitfield(**{name: array[chosen] for name, array in self.arrays()})


def dense(queries: Bitfield, keys: Bitfield) -> Flags:
    """bool[Tq, Tk]: the specification, evaluated for every pair. The reference; O(Tq x Tk) memory."""
    position_k = keys.position[None, :]
    together = (queries.segment[:, None] == keys.segment[None, :]) & (queries.segment >= 0)[:, None]
    allowed = (queries.allow[:, None] & keys.own[None, :]) != 0
    ordered = position_k <= limited(queries).position[:, None]
    kept = (queries.always[:, None] & keys.own[None, :]) != 0
    seen: Flags = together & allowed & ordered & ((position_k >= queries.first[:, None]) | kept)
    return seen


def limited(queries: Bitfield) -> Bitfield:
    """The same queries, all causal, so that rule 3 depends on `position` alone. No longer valid as keys."""
    last = np.where(queries.causal, np.minimum(queries.last, queries.position), queries.last)
    return replace(queries, position=last, causal=np.ones(len(queries), np.bool_))


def uniform(length: int, *, allow: int = TEXT_BIT, own: int = TEXT_BIT, causal: npt.ArrayLike) -> Bitfield:
    """`length` tokens of one segment with the same words, no window; ValueError if length < 0."""
    if length < 0:
        raise ValueError(f"length must be >= 0 tokens, got {length}")
    return Bitfield(
        allow=np.full(length, allow, np.uint64),
        own=np.full(length, own, np.uint64),
        causal=np.broadcast_to(np.asarray(causal, np.bool_), (length,)),
        segment=np.zeros(length, np.int32),
        position=np.arange(length, dtype=np.int32),
        first=np.zeros(length, np.int32),
        always=np.zeros(length, np.uint64),
    )


def padding(length: int) -> Bitfield:
    """`length` tokens that see nothing and are not seen."""
    field = uniform(length, allow=0, own=0, causal=False)
    return replace(field, segment=np.full(length, PADDING, np.int32))


def concatenate(parts: Sequence[Bitfield]) -> Bitfield:
    """Packed side by side: segments are renumbered so that no two parts share one, positions go on.

    ValueError if the packed positions do not fit 32 bits. O(tokens + parts).
    """
    if not parts:
        return uniform(0, causal=False)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in parts[0].arrays()}
    sizes = [len(part) for part in parts]
    spans = [max(len(part), int(part.position.max(initial=-1)) + 1) for part in parts]
    counts = [int(part.segment.max(initial=-1)) + 1 for part in parts]
    shift_t = np.repeat(np.cumsum([0, *spans[:-1]], dtype=np.int64), sizes)
    renumber_t = np.repeat(np.cumsum([0, *counts[:-1]], dtype=np.int64), sizes)
    segment = columns["segment"]
    columns["position"] = columns["position"] + shift_t
    columns["first"] = columns["first"] + shift_t
    columns["start"] = columns["start"] + shift_t
    columns["last"] = np.minimum(columns["last"] + shift_t, NO_LIMIT)
    columns["segment"] = np.where(segment >= 0, segment + renumber_t, PADDING)
    return Bitfield(**columns)


def pad(field: Bitfield, length: int) -> Bitfield:
    """`field` followed by padding up to `length` tokens; ValueError if it is longer than that."""
    if length < len(field):
        raise ValueError(f"cannot pad {len(field)} tokens to {length}: want a length >= {len(field)}")
    return concatenate((field, padding(length - len(field))))


def _checked(name: str, array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """A copy in the field's type."""
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {list(array.shape)}")
    if len(array) != length:
        raise ValueError(f"{name} has {len(array)} tokens, allow has {length}: want equal lengths")
    if name == "causal":
        if array.dtype != np.bool_:
            raise ValueError(f"causal must be bool, got {array.dtype}")
        return array.copy()
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    lowest, highest = (0, _LAST_WORD) if name in _WORDS else (_LOWEST.get(name, 0), NO_LIMIT)
    for bound in (array.min(), array.max()) if array.size else ():
        if not lowest <= int(bound) <= highest:
            limit = f"bits 0 to {MAX_MODALITY}" if name in _WORDS else f"{lowest} to {highest}"
            raise ValueError(f"{name}: want {limit}, got {int(bound)}")
    return array.astype(np.uint64 if name in _WORDS else np.int32)
