"""Ranges of ranks that modules take, and the rules for how they may overlap."""

from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """Ranks [first, first + num_ranks) of a module."""

    module: str
    first: int
    num_ranks: int

    @property
    def end(self) -> int:
        return self.first + self.num_ranks

    def __str__(self) -> str:
        return f"[{self.first}, {self.end}) of {self.module!r}"


class Placement(StrEnum):
    """Modules on separate ranks, or all on the same ranks."""

    APART = "apart"
    SHARED = "shared"


def placement_of(spans: Sequence[Span], starts: Collection[int] = ()) -> Placement:
    """How modules share ranks; a single module counts as APART.

    Args:
        starts: first ranks of pools, where a module may begin though the ranks in front of it are idle.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
    section 3: rank sets are disjoint, or the same ranks under two grids.

    Raises:
        ValueError: ranks that overlap without being equal, or a gap in front of a module; the
            message names the nearest rank_offset that is valid.
    """
    order = sorted(spans, key=lambda span: (span.first, span.num_ranks))
    is_shared = len(spans) > 1 and len({(span.first, span.end) for span in spans}) == 1
    if order[0].first and order[0].first not in starts:
        raise _gap(0, order[0])
    if is_shared:
        return Placement.SHARED
    for before, span in pairwise(order):
        if span.first < before.end:
            raise ValueError(
                f"ranks {before} and {span} overlap without all modules having the same ranks; "
                f"nearest: rank_offset {before.end} for {span.module!r}"
            )
        if span.first > before.end and span.first not in starts:
            raise _gap(before.end, span)
    return Placement.APART


def _gap(end: int, span: Span) -> ValueError:
    return ValueError(
        f"ranks [{end}, {span.first}) in front of {span.module!r} belong to no module; "
        f"nearest: rank_offset {end} for {span.module!r}"
    )
