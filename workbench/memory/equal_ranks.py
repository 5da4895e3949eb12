"""Ranks whose accounts are equal, as those of a tensor-parallel group mostly are: told before any is made."""

from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from workbench.arrays import Ints
from workbench.memory.accounts import Accounts
from workbench.plan.frame import frame_of
from workbench.plan.lowered import ROUTES, Route, Rows
from workbench.plan.lru_cache import Identity, LruCache

MOST_RANKS = 200_000  # of all plans whose rows are remembered
LEAST_ROWS = 16  # with the same ends, on average: accounts of fewer cost no more than to compare them
_ROWS_OF: LruCache[Mapping[int, int]] = LruCache(MOST_RANKS, lambda of: len(of) + 1)


def equal_ranks(accounts: Accounts) -> dict[int, int]:
    """Rank -> the first of the wanted ones that is known to have an equal account.

    Their stages, programs and gradients are equal, and they send and receive the same at the same places, to
    and from ranks with equal programs.

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
    """Of the rows that have the same ranks as ends.

    Args:
        rows: a number for what they are.
        sends: whether the rank is their sender.
    """

    rows: int
    sends: bool


def _rows_of(rows: Rows, program: Mapping[int, Hashable]) -> dict[int, int]:
    """Rank -> a number for all that its rows say; ranks without rows have none.

    What a rank holds of a row follows from the places of its ends in the programs of both, and from what the
    two send each other else. So ranks have the same where each list of rows that one has with others has its
    equal, with others that have equal programs and, with it, equal lists.
    """
    if len(rows) < LEAST_ROWS * len(rows.ends):
        return {rank: number for number, rank in enumerate(program)}
    lists = _lists(rows)
    members = {number: {source, *others} for number, (source, others) in enumerate(rows.ends)}
    of_pair: dict[tuple[int, int], list[_Share]] = {}
    for number, of_list in lists.items():
        for rank in members[number]:
            share = _Share(of_list, rank == rows.ends[number].source_rank)
            for other in members[number] - {rank}:
                of_pair.setdefault((rank, other), []).append(share)
    known: dict[Hashable, int] = {}
    pair = {
        (rank, other): known.setdefault((id(program.get(other)), tuple(sorted(shares))), len(known))
        for (rank, other), shares in of_pair.items()
    }
    of_rank: dict[int, list[tuple[_Share, tuple[int, ...]]]] = {}
    for number, of_list in lists.items():
        for rank in members[number]:
            share = _Share(of_list, rank == rows.ends[number].source_rank)
            others = sorted([pair[rank, other] for other in members[number] - {rank}])
            of_rank.setdefault(rank, []).append((share, tuple(others)))
    known = {}
    return {rank: known.setdefault(tuple(sorted(shares)), len(known)) for rank, shares in of_rank.items()}


def _lists(rows: Rows) -> dict[int, int]:
    """Ends -> a number for the rows that have them: of which tensors, and by which route."""
    is_passed_on = (rows.after >= 0) & (rows.route[rows.after] != ROUTES[Route.LOCAL])
    what = (_tensors(rows) * len(ROUTES) + rows.route) * 2 + is_passed_on
    few = rows.end.astype(np.min_scalar_type(len(rows.ends)))  # sorts in linear time where 16 bits are enough
    order = np.argsort(few, kind="stable")
    ends, what = rows.end[order], what[order]
    first = np.flatnonzero(np.diff(ends, prepend=-1))
    spans = pairwise([*first.tolist(), len(ends)])
    known: dict[bytes, int] = {}
    return {
        end: known.setdefault(what[start:stop].tobytes(), len(known))
        for end, (start, stop) in zip(ends[first].tolist(), spans, strict=True)
    }


def _tensors(rows: Rows) -> Ints:
    """[R] a number for the tensor of each: rows of one follow each other, unlike in ends and routes alone."""
    columns = rows.producer, rows.consumer, rows.content, rows.named, rows.edge, rows.num_bytes
    is_new = np.zeros(len(rows), np.bool_)
    for column in (*columns, rows.is_backward):
        is_new[1:] |= column[1:] != column[:-1]
    return np.cumsum(is_new)
