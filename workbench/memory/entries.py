"""The memory account of ranks: bytes that each action allocates and frees, from passes and rows."""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.arrays import Flags, Ints
from workbench.memory.accounts import Accounts
from workbench.memory.boundary_rows import RowLines, row_holdings, row_lines
from workbench.memory.holdings import Holding, Part
from workbench.memory.pass_lines import PassLines
from workbench.memory.stage import StateKind
from workbench.plan.lru_cache import LruCache

MOST_ACTIONS = 1_000_000  # in all cached ranks together
_PASSES: LruCache[Ints] = LruCache(MOST_ACTIONS, lambda columns: columns.shape[1] + 1)


@dataclass(frozen=True, slots=True)
class Lines:
    """A rank's account, by position in its program: allocated when an action starts, freed when it ends."""

    acquired: list[int]
    released: list[int]


def rank_lines(accounts: Accounts) -> dict[int, Lines]:
    """Return the lines of the needed ranks, without weights that move to and from a host or peers."""
    columns_of = _pass_columns(accounts)
    passes = [columns_of[accounts.shape(rank)] for rank in accounts.ranks]
    rows = row_lines(accounts)
    acquired_released = (
        np.stack(_with_rows(np.concatenate(passes, axis=1), rows)) if passes else np.zeros((2, 0), np.int64)
    )
    lines_of: dict[bytes, Lines] = {}
    by_rank: dict[int, Lines] = {}
    for (rank, first), columns in zip(rows.first.items(), passes, strict=True):
        of_rank = acquired_released[:, first : first + columns.shape[1]]
        if (key := of_rank.tobytes()) not in lines_of:
            lines_of[key] = Lines(*of_rank.tolist())
        by_rank[rank] = lines_of[key]
    return by_rank


def _pass_columns(accounts: Accounts) -> dict[Hashable, Ints]:
    """Return the columns of `PassLines` of every shape of a needed rank."""
    rank_of = {accounts.shape(rank): rank for rank in reversed(accounts.ranks)}
    key_of = {shape: accounts.decisive(rank) for shape, rank in rank_of.items()}
    cached = {shape: _PASSES.get(key) for shape, key in key_of.items()}
    missing = [shape for shape, columns in cached.items() if columns is None]
    lines = PassLines(accounts, [rank_of[shape] for shape in missing])
    splits = np.split(lines.columns(), np.cumsum(lines.lengths)[:-1], axis=1) if missing else ()
    derived = dict(zip(missing, splits, strict=True))
    for shape, columns in derived.items():
        _PASSES.put(key_of[shape], columns)
    return {shape: columns for shape, columns in cached.items() if columns is not None} | derived


def _with_rows(passes: Ints, rows: RowLines) -> tuple[Ints, Ints]:
    """Return the bytes acquired and released by cell, from the columns of `PassLines` end to end."""
    acquired, released = passes[0] + rows.acquired, passes[1] + rows.released
    for _, last, num_bytes in _joint_holdings(passes, rows):
        acquired += num_bytes
        np.add.at(released, last, num_bytes)
    return acquired, released


def _joint_holdings(passes: Ints, rows: RowLines) -> Iterator[tuple[Part, Ints, Ints]]:
    """Yield (part, last cell, bytes) of what each cell acquires by its pass and its rows together.

    A forward's inputs and what else it keeps stay until its backward, its output also until consumers and
    sends are done with it.
    """
    _, _, kept, input_kept, output, joined, distance = passes
    cells = np.arange(len(distance))
    kept = kept + rows.held - np.minimum(input_kept, rows.held + rows.passed_on)
    yield Part.ACTIVATIONS, cells + distance, kept
    yield Part.ACTIVATIONS, np.maximum(cells + distance, rows.output_end), output
    yield Part.MESSAGES, cells, np.where(rows.is_joined, joined, 0)


class RankHoldings(NamedTuple):
    """All that a rank's actions hold, without weights that move to and from a host or peers.

    Args:
        holdings: by position in the rank's program.
        makes_first: by position, as of `PassLines`.
    """

    holdings: tuple[Holding, ...]
    makes_first: Flags


def rank_holdings(accounts: Accounts, rank: int) -> RankHoldings:
    """Return what the lines of one rank add up, derived anew; `accounts` are of this rank alone."""
    lines = PassLines(accounts, (rank,))
    passes, (rows, of_rows) = lines.columns(), row_holdings(accounts)
    cells = np.arange(passes.shape[1])
    joint = (Holding(part, lines.stage, cells, *rest) for part, *rest in _joint_holdings(passes, rows))
    return RankHoldings((*lines.holdings, *of_rows, *joint), lines.makes_first)


def gradient_lines(accounts: Accounts, rank: int) -> dict[int, Counter[StateKind]]:
    """Return the weights' gradients that a rank allocates, by position in its program."""
    by_position: dict[int, Counter[StateKind]] = {}
    for _, _, first, kind, num_bytes in PassLines(accounts, (rank,)).gradients():
        by_position.setdefault(first, Counter())[kind] += num_bytes
    return by_position
