"""Ranks whose memory accounts are equal, as in most tensor-parallel groups: found before making them."""

from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from workbench.arrays import Ints
from workbench.memory.accounts import Accounts
from workbench.plan.frame import frame_of
from workbench.plan.lowered import ROUTES, Route, Rows
from workbench.plan.lru_cache import Identity, LruCache

MOST_RANKS = 200_000  # in all cached plans together
LEAST_ROWS = 16  # per pair of ends, on average: with fewer, accounts are as cheap as comparing them
_ROWS_OF: LruCache[Mapping[int, int]] = LruCache(MOST_RANKS, lambda keys: len(keys) + 1)


def equal_ranks(accounts: Accounts) -> dict[int, int]:
    """Map each needed rank to the first of them that is known to have an equal account.

    Their stages, programs and gradients are equal, and they send and receive the same rows at the same
    positions, to and from ranks with equal programs.

    Complexity: O(rows + pairs of ranks of which one sends to the other), apart from sorting.
    """
    lowered = accounts.lowered
    key = frame_of(lowered.plan), Identity(lowered.transfers)
    rows_of = _ROWS_OF.get_or(key, lambda: _rows_of(lowered.rows, lowered.plan.program))
    first: dict[Hashable, int] = {}
    return {
        rank: first.setdefault((accounts.shape(rank), rows_of.get(rank)), rank) for rank in accounts.ranks
    }


class _Share(NamedTuple):
    """A rank's part in rows that have the same ranks as ends.

    Args:
        rows: a number for the list of rows.
        sends: whether the rank is their sender.
    """

    rows: int
    sends: bool


def _rows_of(rows: Rows, program: Mapping[int, Hashable]) -> dict[int, int]:
    """Map each rank to a number for everything that its rows decide; ranks without rows have none.

    What a rank holds of a row follows from the positions of its ends in both programs, and from what else the
    two send each other. So two ranks hold the same if each list of rows that one has with peers has an equal
    list of the other's, with peers that have equal programs and, with the rank, equal lists.
    """
    if len(rows) < LEAST_ROWS * len(rows.ends):
        return {rank: number for number, rank in enumerate(program)}
    lists = _row_lists(rows)
    members = {number: {source, *others} for number, (source, others) in enumerate(rows.ends)}
    shares_of_pair: dict[tuple[int, int], list[_Share]] = {}
    for number, row_list in lists.items():
        for rank in members[number]:
            share = _Share(row_list, rank == rows.ends[number].source_rank)
            for other in members[number] - {rank}:
                shares_of_pair.setdefault((rank, other), []).append(share)
    number_of: dict[Hashable, int] = {}
    pair_number = {
        (rank, other): number_of.setdefault((id(program.get(other)), tuple(sorted(shares))), len(number_of))
        for (rank, other), shares in shares_of_pair.items()
    }
    shares_of_rank: dict[int, list[tuple[_Share, tuple[int, ...]]]] = {}
    for number, row_list in lists.items():
        for rank in members[number]:
            share = _Share(row_list, rank == rows.ends[number].source_rank)
            others = sorted([pair_number[rank, other] for other in members[number] - {rank}])
            shares_of_rank.setdefault(rank, []).append((share, tuple(others)))
    number_of = {}
    return {
        rank: number_of.setdefault(tuple(sorted(shares)), len(number_of))
        for rank, shares in shares_of_rank.items()
    }


def _row_lists(rows: Rows) -> dict[int, int]:
    """Map ends to a number for the list of their rows: which tensors, and by which routes."""
    is_passed_on = (rows.after >= 0) & (rows.route[rows.after] != ROUTES[Route.LOCAL])
    content = (_tensors(rows) * len(ROUTES) + rows.route) * 2 + is_passed_on
    narrow = rows.end.astype(np.min_scalar_type(len(rows.ends)))  # 16 bits are sorted in linear time
    order = np.argsort(narrow, kind="stable")
    ends, content = rows.end[order], content[order]
    first = np.flatnonzero(np.diff(ends, prepend=-1))
    spans = pairwise([*first.tolist(), len(ends)])
    number_of: dict[bytes, int] = {}
    return {
        end: number_of.setdefault(content[start:stop].tobytes(), len(number_of))
        for end, (start, stop) in zip(ends[first].tolist(), spans, strict=True)
    }


def _tensors(rows: Rows) -> Ints:
    """[R] number of each row's tensor; rows of a tensor are adjacent and differ only in ends and routes."""
    columns = rows.producer, rows.consumer, rows.content, rows.named, rows.edge, rows.num_bytes
    is_new = np.zeros(len(rows), np.bool_)
    for column in (*columns, rows.is_backward):
        is_new[1:] |= column[1:] != column[:-1]
    return np.cumsum(is_new)
