"""One attention launch on one GPU: rows of tiles split into blocks of the grid, scheduled, and merged.

Shape letters: R = query blocks (rows) of the rank, S = slots of key positions, P = pieces of one head,
N = pieces of all heads of the launch.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sim.attention.gpu import Schedule, list_schedule, longest_first
from workbench.arrays import Floats, Ints

WAVES = (1.0, 2.0, 4.0, 8.0)  # numbers of pieces per unit that are tried
WORTH_SPLITTING = 1.25  # a row is split only where it is longer than this many target pieces


class Order(StrEnum):
    """Launch order of the grid."""

    STATIC = "static"  # head by head, rows ascending: a kernel without a work list
    LONGEST_FIRST = "longest_first"


class Split(StrEnum):
    """How rows are split into pieces."""

    NONE = "none"
    FIXED = "fixed"  # at fixed key positions, empty pieces included, as the Cornstarch kernel does
    WHERE_IT_PAYS = "where_it_pays"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTiming:
    """Seconds that the work of a kernel takes on one compute unit.

    Args:
        tile_s: one full tile.
        block_s: prologue and epilogue of a block of the grid, on top of its tiles.
        partial_s: writing the partial result of one piece of a split row.
        merge_s: reading one partial result back and accumulating it.
        launch_s: from the end of a kernel to the start of one that depends on it.
    """

    tile_s: float
    block_s: float = 0.0
    partial_s: float = 0.0
    merge_s: float = 0.0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if self.tile_s <= 0 or min(self.block_s, self.partial_s, self.merge_s, self.launch_s) < 0:
            raise ValueError(f"unit timing: want tile_s > 0 and the others >= 0, got {self}")

    def scaled(self, factor: float) -> "UnitTiming":
        """These timings multiplied by a factor."""
        return UnitTiming(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Rows split into blocks of the grid, in static order, for one head.

    No `slots`: counts are cached on the instance.

    Args:
        row: [P] ascending row of each piece.
        tiles: [P] work of each piece, in full tiles.
        num_rows: R; a row without a piece has no block.
    """

    row: Ints
    tiles: Floats
    num_rows: int

    @cached_property
    def per_row(self) -> Ints:
        """[R] number of pieces of each row."""
        return np.bincount(self.row, minlength=self.num_rows).astype(np.int64)

    def durations_s(self, timing: UnitTiming) -> Floats:
        """[P] seconds of each block; pieces of split rows also write a partial result."""
        cut = (self.per_row > 1)[self.row]
        return timing.block_s + np.where(cut, timing.partial_s, 0.0) + self.tiles * timing.tile_s

    def merges_s(self, timing: UnitTiming) -> Floats:
        """[split rows] seconds of each block of the merging kernel."""
        return self.per_row[self.per_row > 1].astype(np.float64) * timing.merge_s


def whole_rows(tiles: npt.ArrayLike) -> Pieces:
    """One block per row; empty rows have one too, as they still store zeros."""
    by_slot = _checked(tiles)
    return Pieces(row=np.arange(len(by_slot)), tiles=by_slot.sum(axis=1), num_rows=len(by_slot))


def fixed_pieces(tiles: npt.ArrayLike) -> Pieces:
    """One block per row and slot of key positions, empty ones included."""
    by_slot = _checked(tiles)
    num_rows, num_slots = by_slot.shape
    return Pieces(row=np.repeat(np.arange(num_rows), num_slots), tiles=by_slot.ravel(), num_rows=num_rows)


def even_pieces(tiles: npt.ArrayLike, pieces: npt.ArrayLike) -> Pieces:
    """Split row r into pieces[r] equal parts of its list of tiles; at most one per tile.

    Raises:
        ValueError: a count below 1 or of another length than the rows.
    """
    by_row = whole_rows(tiles).tiles
    counts = np.asarray(pieces, dtype=np.int64)
    if counts.shape != by_row.shape or (len(counts) and counts.min() < 1):
        raise ValueError(f"pieces: want a count >= 1 for each of {len(by_row)} rows")
    counts = np.minimum(counts, np.maximum(1, np.ceil(by_row).astype(np.int64)))
    row = np.repeat(np.arange(len(counts)), counts)
    return Pieces(row=row, tiles=(by_row / counts)[row], num_rows=len(counts))


def pieces_where_it_pays(
    tiles: npt.ArrayLike,
    num_heads: int,
    num_units: int,
    timing: UnitTiming,
    order: Order = Order.LONGEST_FIRST,
) -> Pieces:
    """The split that ends earliest, among whole rows and a few target piece lengths; whole rows win ties.

    With w waves, the target is (all work / units / w): rows longer than `WORTH_SPLITTING` targets are split
    into pieces of about that length. The result never ends later than whole rows.

    Complexity: O(len(WAVES) x N log N).
    """
    whole = whole_rows(tiles)
    by_row = whole.tiles
    best, best_s = whole, run_launch(whole, num_heads, num_units, timing, order).end_s
    for waves in WAVES:
        share = by_row.sum() * num_heads / (num_units * waves)
        if share <= 0 or not np.any(by_row > WORTH_SPLITTING * share):
            continue
        counts = np.where(by_row > WORTH_SPLITTING * share, np.ceil(by_row / share), 1)
        pieces = even_pieces(by_row, counts)
        end_s = run_launch(pieces, num_heads, num_units, timing, order).end_s
        if end_s < best_s:
            best, best_s = pieces, end_s
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRun:
    """Times of one launch: the grid, and the merging kernel after it where rows are split.

    Args:
        blocks, merges: as scheduled without the delay; equal launches of one rank share them.
        end_s: end of the last block of both kernels.
        delay_s: by how much everything ran later than scheduled.
    """

    blocks: Schedule
    merges: Schedule | None
    end_s: float
    delay_s: float = 0.0

    @property
    def first_s(self) -> float:
        """Start of the first block."""
        return self.blocks.first_s + self.delay_s

    @property
    def busy_s(self) -> float:
        """Unit-seconds of work, including merging."""
        return self.blocks.busy_s + (0.0 if self.merges is None else self.merges.busy_s)

    @property
    def spans_s(self) -> tuple[Floats, Floats]:
        """Start and end times of all blocks of both kernels."""
        parts = [self.blocks] if self.merges is None else [self.blocks, self.merges]
        start_s = np.concatenate([part.start_s for part in parts]) + self.delay_s
        return start_s, np.concatenate([part.end_s for part in parts]) + self.delay_s

    @property
    def free_s(self) -> Floats:
        """[U] end of each unit's last block."""
        return (self.merges or self.blocks).free_s + self.delay_s

    def shifted(self, delay_s: float) -> "LaunchRun":
        """The same run, delayed. O(1)."""
        return replace(self, end_s=self.end_s + delay_s, delay_s=self.delay_s + delay_s)


def run_launch(
    pieces: Pieces,
    num_heads: int,
    num_units: int,
    timing: UnitTiming,
    order: Order,
    *,
    free_s: npt.ArrayLike | None = None,
    release_s: float = 0.0,
) -> LaunchRun:
    """Run `num_heads` copies of the pieces as one grid; the merging kernel waits for its end.

    Raises:
        ValueError: fewer than one head.

    Complexity: O(N log N).
    """
    if num_heads < 1:
        raise ValueError(f"heads of a launch: want >= 1, got {num_heads}")
    durations = np.tile(pieces.durations_s(timing), num_heads)
    if order is Order.LONGEST_FIRST:
        durations = durations[longest_first(durations)]
    blocks = list_schedule(durations, num_units, free_s=free_s, release_s=release_s)
    merges_s = np.tile(pieces.merges_s(timing), num_heads)
    end_s = max(blocks.makespan_s, release_s)
    if not len(merges_s):
        return LaunchRun(blocks=blocks, merges=None, end_s=end_s)
    merges = list_schedule(merges_s, num_units, free_s=blocks.free_s, release_s=end_s + timing.launch_s)
    return LaunchRun(blocks=blocks, merges=merges, end_s=merges.makespan_s)


def cut(
    tiles: npt.ArrayLike,
    split: Split,
    num_heads: int,
    num_units: int,
    timing: UnitTiming,
    order: Order,
) -> Pieces:
    """Split rows by the given policy."""
    if split is Split.NONE:
        return whole_rows(tiles)
    if split is Split.FIXED:
        return fixed_pieces(tiles)
    return pieces_where_it_pays(tiles, num_heads, num_units, timing, order)


def _checked(tiles: npt.ArrayLike) -> Floats:
    """[R, S] tiles as floats, from [R] or [R, S]; ValueError where negative or not finite."""
    by_slot = np.asarray(tiles, dtype=np.float64)
    if by_slot.ndim == 1:
        by_slot = by_slot[:, None]
    if by_slot.ndim != 2 or not np.all(np.isfinite(by_slot) & (by_slot >= 0)):
        raise ValueError("tiles: want finite numbers >= 0 by row, or by row and slot of key positions")
    return by_slot
