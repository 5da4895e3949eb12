"""Who takes how much memory at which action, and gives it back at which: the lines of the account."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from workbench.arrays import Ints
from workbench.memory.accounts import Accounts
from workbench.memory.boundary_rows import RowLines, row_lines
from workbench.memory.pass_lines import PassLines
from workbench.memory.stage import StateKind
from workbench.plan.lru_cache import LruCache

MOST_ACTIONS = 1_000_000  # of all ranks whose passes are remembered
_PASSES: LruCache[Ints] = LruCache(MOST_ACTIONS, lambda columns: columns.shape[1] + 1)


@dataclass(frozen=True, slots=True)
class Lines:
    """A rank's account, by place in its program: taken when an action starts, given back at its end."""

    acquired: list[int]
    released: list[int]


def rank_lines(accounts: Accounts) -> dict[int, Lines]:
    """Everything of the wanted ranks but what moves to and from a host or peers; equal ones share theirs."""
    of_shape = _passes(accounts)
    passes = [of_shape[accounts.shape(rank)] for rank in accounts.ranks]
    rows = row_lines(accounts)
    both = (
        np.stack(_with_rows(np.concatenate(passes, axis=1), rows)) if passes else np.zeros((2, 0), np.int64)
    )
    known: dict[bytes, Lines] = {}
    found: dict[int, Lines] = {}
    for (rank, first), columns in zip(rows.first.items(), passes, strict=True):
        own = both[:, first : first + columns.shape[1]]
        if (name := own.tobytes()) not in known:
            known[name] = Lines(*own.tolist())
        found[rank] = known[name]
    return found


def _passes(accounts: Accounts) -> dict[Hashable, Ints]:
    """Columns of `PassLines` of every shape of a wanted rank."""
    rank_of = {accounts.shape(rank): rank for rank in reversed(accounts.ranks)}
    key_of = {shape: accounts.decisive(rank) for shape, rank in rank_of.items()}
    known = {shape: _PASSES.get(key) for shape, key in key_of.items()}
    wanted = [shape for shape, columns in known.items() if columns is None]
    lines = PassLines(accounts, [rank_of[shape] for shape in wanted])
    each = np.split(lines.columns(), np.cumsum(lines.lengths)[:-1], axis=1) if wanted else ()
    derived = dict(zip(wanted, each, strict=True))
    for shape, columns in derived.items():
        _PASSES.put(key_of[shape], columns)
    return {shape: columns for shape, columns in known.items() if columns is not None} | derived


def _with_rows(passes: Ints, rows: RowLines) -> tuple[Ints, Ints]:
    """What is acquired and released by cell, of the columns of `PassLines` end to end.

    A forward's inputs and what it keeps beyond them stay until its backward, its output also until
    consumers or sends are through with it.
    """
    acquired, released, kept, input_kept, output, joined, until = passes
    cells = np.arange(len(until))
    kept = kept + rows.held - np.minimum(input_kept, rows.held + rows.passed_on)
    during = np.where(rows.is_joined, joined, 0)
    acquired = acquired + rows.acquired + during + kept + output
    released = released + rows.released + during
    np.add.at(released, cells + until, kept)
    np.add.at(released, np.maximum(cells + until, rows.output_end), output)
    return acquired, released


def gradient_lines(accounts: Accounts, rank: int) -> dict[int, Counter[StateKind]]:
    """Of what a rank takes, the weights' gradients, by place in its program."""
    found: dict[int, Counter[StateKind]] = {}
    for _, first, kind, num_bytes in PassLines(accounts, (rank,)).gradients():
        found.setdefault(first, Counter())[kind] += num_bytes
    return found
