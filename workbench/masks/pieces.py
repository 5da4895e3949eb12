"""Summaries of blocks of tokens: their pieces, and a tree over the pieces of the keys.

A piece is the set of tokens of one block that differ only in their positions: whether a piece of queries
sees a piece of keys is then a matter of smallest and largest positions. The order of tokens inside a block
does not matter, so a permuted block has no more pieces than a sorted one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.compiled import compiled
from workbench.masks.bitfield import Bitfield, limited
from workbench.masks.tile_walk import FANOUT

PIECE = np.dtype(
    [
        ("word", np.uint64),  # queries: allow; keys: own
        ("always", np.uint64),
        ("segment", np.int32),
        ("causal", np.int32),
        ("position_min", np.int32),
        ("position_max", np.int32),
        ("first_min", np.int32),
        ("first_max", np.int32),
        ("start", np.int64),  # its tokens are [start, end) in grouped order
        ("end", np.int64),
    ],
    align=True,
)
NODE = np.dtype(
    [
        ("own_any", np.uint64),  # groups that some key is in
        ("own_all", np.uint64),  # groups that every key is in
        ("segment_min", np.int32),
        ("segment_max", np.int32),
        ("position_min", np.int32),
        ("position_max", np.int32),
        ("unowned", np.int32),  # whether some key is in no group
        ("start", np.int64),  # its keys are [start, end) in grouped order
        ("end", np.int64),
    ],
    align=True,
)
Records = npt.NDArray[Any]
Places = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlocks:
    """PIECE[num_pieces] of all blocks in order; block i has [offsets[i], offsets[i + 1]).

    `position` and `first` are int32[T], grouped by piece.
    """

    pieces: Records
    offsets: Offsets
    position: Places
    first: Places


@dataclass(frozen=True, slots=True, eq=False)
class KeyBlocks:
    """NODE[num_pieces] of all blocks in order, and the tree over the blocks.

    `position` is int32[T], grouped by piece and ascending within each. Level 0 of `tree` are the
    blocks themselves, and each node of a level spans `FANOUT` nodes of the one below, up to one root;
    level i is tree[level_offsets[i]:level_offsets[i + 1]].
    """

    pieces: Records
    offsets: Offsets
    position: Places
    tree: Records
    level_offsets: Offsets


def query_blocks(queries: Bitfield, block: int) -> QueryBlocks:
    """Summarize queries. O(T x pieces of a block) time, 8 bytes per token besides the pieces."""
    queries = limited(queries)
    pieces, offsets, position, first = _gather(
        queries.allow,
        queries.always,
        queries.segment,
        queries.causal,
        (queries.position, queries.first),
        block,
    )
    return QueryBlocks(pieces, offsets, position, first)


def key_blocks(keys: Bitfield, block: int) -> KeyBlocks:
    """Summarize keys, at least one. Costs as `query_blocks`."""
    zero = np.zeros(len(keys), np.uint64)
    causal = np.zeros(len(keys), np.bool_)
    grouped, offsets, position, _ = _gather(
        keys.own, zero, keys.segment, causal, (keys.position, keys.position), block
    )
    pieces = np.empty(len(grouped), NODE)
    pieces["own_any"] = pieces["own_all"] = grouped["word"]
    pieces["segment_min"] = pieces["segment_max"] = grouped["segment"]
    pieces["unowned"] = grouped["word"] == 0
    for name in ("position_min", "position_max", "start", "end"):
        pieces[name] = grouped[name]
    levels = [_merged(pieces, offsets[:-1])]
    while len(levels[-1]) > 1:
        levels.append(_merged(levels[-1], np.arange(0, len(levels[-1]), FANOUT)))
    level_offsets = np.cumsum([0, *(len(level) for level in levels)], dtype=np.int64)
    ascending = _ascending(position, pieces)
    return KeyBlocks(pieces, offsets, ascending, np.concatenate(levels), level_offsets)


def _merged(nodes: Records, starts: Offsets) -> Records:
    """NODE[len(starts)]: merge runs of nodes, each from its start to the next one's."""
    merged = np.empty(len(starts), NODE)
    merged["own_any"] = np.bitwise_or.reduceat(nodes["own_any"], starts)
    merged["own_all"] = np.bitwise_and.reduceat(nodes["own_all"], starts)
    for name in ("segment_min", "position_min", "start"):
        merged[name] = np.minimum.reduceat(nodes[name], starts)
    for name in ("segment_max", "position_max", "unowned", "end"):
        merged[name] = np.maximum.reduceat(nodes[name], starts)
    return merged


def _ascending(position: Places, pieces: Records) -> Places:
    """Positions sorted within every piece; usually they already are."""
    falls = position[1:] < position[:-1]
    falls[pieces["start"][1:] - 1] = False
    if not falls.any():
        return position
    piece = np.repeat(np.arange(len(pieces)), pieces["end"] - pieces["start"])
    return position[np.lexsort((position, piece))]


@compiled
def _gather(
    word: npt.NDArray[np.uint64],
    always: npt.NDArray[np.uint64],
    segment: Places,
    causal: npt.NDArray[np.bool_],
    places: tuple[Places, Places],
    block: int,
) -> tuple[Records, Offsets, Places, Places]:
    """Pieces of every block, and position and first of the tokens grouped by piece."""
    length = len(word)
    num_blocks = (length + block - 1) // block
    pieces = np.empty(2 * num_blocks + block, PIECE)
    offsets = np.zeros(num_blocks + 1, np.int64)
    position, first = np.empty(length, np.int32), np.empty(length, np.int32)
    label = np.empty(block, np.int64)
    count = 0
    for index in range(num_blocks):
        start, base = index * block, count
        end = min(start + block, length)
        if count + block > len(pieces):
            more = np.empty(2 * len(pieces) + block, PIECE)
            more[:count] = pieces[:count]
            pieces = more
        at = base
        for token in range(start, end):
            key = (word[token], always[token], segment[token], causal[token])
            at = _find(pieces, base, count, at, key)
            if at == count:
                _start_piece(pieces, at, key, places[0][token], places[1][token])
                count += 1
            else:
                _extend(pieces, at, places[0][token], places[1][token])
            label[token - start] = at
        offsets[index + 1] = count
        for piece in range(base, count):
            size = pieces[piece].end
            pieces[piece].start = pieces[piece].end = start
            start += size
        start = index * block
        for token in range(start, end):
            into = pieces[label[token - start]].end
            position[into], first[into] = places[0][token], places[1][token]
            pieces[label[token - start]].end = into + 1
    return pieces[:count].copy(), offsets, position, first


@compiled
def _find(pieces: Records, base: int, count: int, guess: int, key: tuple[Any, ...]) -> int:
    """Index of this key's piece in [base, count), or count; the guess (the last token's) is tried first."""
    if guess < count and _matches(pieces, guess, key):
        return guess
    for at in range(base, count):
        if _matches(pieces, at, key):
            return at
    return count


@compiled
def _matches(pieces: Records, at: int, key: tuple[Any, ...]) -> bool:
    piece = pieces[at]
    same: bool = (
        piece.word == key[0] and piece.segment == key[2] and piece.causal == key[3] and piece.always == key[1]
    )
    return same


@compiled
def _start_piece(pieces: Records, at: int, key: tuple[Any, ...], position: int, first: int) -> None:
    """Start a piece with one token; `end` counts tokens for now."""
    piece = pieces[at]
    piece.word, piece.always, piece.segment, piece.causal = key[0], key[1], key[2], key[3]
    piece.position_min = piece.position_max = position
    piece.first_min = piece.first_max = first
    piece.end = 1


@compiled
def _extend(pieces: Records, at: int, position: int, first: int) -> None:
    piece = pieces[at]
    piece.position_min = min(piece.position_min, position)
    piece.position_max = max(piece.position_max, position)
    piece.first_min = min(piece.first_min, first)
    piece.first_max = max(piece.first_max, first)
    piece.end += 1
