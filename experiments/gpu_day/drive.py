"""Measures the cells that have no row yet, part by part, until all are done or the time is up."""

import datetime
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.gpu_day.campaign import Cell, Extent, Measured, Part
from experiments.gpu_day.store import Store, StoredRow
from experiments.gpu_day.worker import CellError, HungError, Worker
from experiments.harness.reads import sources_hash

IN_A_ROW = 3  # cells that break their process, after which a part is given up; a refusal breaks nothing
LEAST_S = 5.0  # of the time left, for another cell to be begun
START_S = 180.0  # of a part, to say which cells it has: imports on a cold disk
QUIET_S = 2.0  # between two lines of cells that went well
DRIVER = "driver"  # machines of one kind differ in it, and rows are kept all the same

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The device and the software that measure.

    Args:
        versions: package -> version.
        extent: how much is measured.
    """

    device_name: str
    versions: Mapping[str, str]
    extent: Extent


@dataclass(frozen=True, slots=True)
class Deadline:
    """When to stop; None: never."""

    limit_s: float | None = None
    began_s: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began_s

    def left_s(self) -> float:
        return float("inf") if self.limit_s is None else self.limit_s - self.spent_s


@dataclass(frozen=True, slots=True)
class Choice:
    """What a call does.

    Args:
        parts: of the campaign.
        words: only cells with one of them in their key; none: all.
        share: (number, of): only every so many-th cell of a part, from that one, counted from 1.
    """

    parts: tuple[Part, ...]
    words: tuple[str, ...] = ()
    share: tuple[int, int] = (1, 1)

    def takes(self, cell: Cell, number: int) -> bool:
        """Whether it does the cell of that number of a part."""
        first, of = self.share
        has_word = not self.words or any(word in cell.key for word in self.words)
        return has_word and number % of == first % of


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """How far a part is.

    Args:
        stamp: that its rows must have.
        num_cells: None where it did not get to say so.
        num_done: cells with a row.
        failures: one line each.
    """

    stamp: str
    num_cells: int | None
    num_done: int
    failures: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return self.num_cells == self.num_done and not self.failures


def stamp_of(part: Part, here: Here, needed: Iterable[Mapping[str, Any]]) -> str:
    """What the part's rows must have been measured with: sources, software, extent, rows of other parts."""
    versions = {name: version for name, version in here.versions.items() if name != DRIVER}
    content = [sources_hash(part.module), versions, here.extent, list(needed)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def drive(
    parts: Sequence[Part],
    choice: Choice,
    worker: Worker,
    store: Store,
    here: Here,
    deadline: Deadline,
    say: Say,
) -> dict[str, PartState]:
    """Do what is left of what was chosen.

    Args:
        parts: all, in order; a part comes after those that it needs.
        choice: what of them to do.
        say: called with a line after every cell.

    Returns:
        the state of every part, by name; of one that was not chosen, what its rows say.
    """
    states: dict[str, PartState] = {}
    for part in parts:
        needed = [store.values(name, states[name].stamp) for name in part.needs]
        one = _PartRun(part, stamp_of(part, here, needed), worker, store, here, deadline, say)
        stale = [name for name in part.needs if _has_other_rows(store, name, states[name].stamp)]
        if part in choice.parts and deadline.left_s() > LEAST_S:
            states[part.name] = one.refuse(stale[0]) if stale else one.run(choice)
        else:
            states[part.name] = one.looked_at()
    return states


def _has_other_rows(store: Store, part: str, stamp: str) -> bool:
    return any(row.stamp != stamp for row in store.rows.get(part, {}).values())


class _PartRun:
    """One part in one call."""

    def __init__(
        self, part: Part, stamp: str, worker: Worker, store: Store, here: Here, deadline: Deadline, say: Say
    ) -> None:
        self._part, self._stamp, self._worker, self._store = part, stamp, worker, store
        self._here, self._deadline, self._say = here, deadline, say
        self._longest_s = LEAST_S
        self._took_s = {key: row.seconds for key, row in store.rows.get(part.name, {}).items()}
        self._best: tuple[float, str] | None = None
        self._failures: list[str] = []
        self._in_a_row = 0
        self._said_s = -QUIET_S

    def looked_at(self) -> PartState:
        """What its rows say; nothing is measured."""
        done = self._store.values(self._part.name, self._stamp)
        if not done or self._deadline.left_s() <= LEAST_S:
            return self._state(None)
        try:
            return self._state(len(self._cells()))
        except (ValueError, CellError):
            return self._state(None)

    def refuse(self, needed: str) -> PartState:
        """Start from nothing that was measured with other sources or software."""
        self._fail(f"rows of {needed} are of other sources or software; want --only {needed} first")
        return self._state(None)

    def run(self, choice: Choice) -> PartState:
        """Measure what has no row yet and may end in time, by an earlier call or by the longest so far."""
        try:
            cells = self._cells()
        except (ValueError, CellError) as error:
            if not self._is_over(error):
                self._fail(str(error))
            return self._state(None)
        self._store.keep(self._part.name, [cell.key for cell in cells])
        for number, cell in enumerate(cells, 1):
            if cell.key in self._store.values(self._part.name, self._stamp):
                continue
            if not choice.takes(cell, number):
                continue
            if self._in_a_row >= IN_A_ROW:
                break
            if self._deadline.left_s() < self._took_s.get(cell.key, self._longest_s):
                continue
            self._measure(cell, f"{number}/{len(cells)} {cell.key}")
        return self._state(len(cells))

    def _fail(self, why: str) -> None:
        self._failures.append(f"{self._part.name}: {why}")
        self._say(self._line(f"FAILED: {why}"))

    def _cells(self) -> tuple[Cell, ...]:
        bound_s = min(START_S, self._deadline.left_s())
        return tuple(self._worker.call(self._part.module, "cells", timeout_s=bound_s))

    def _measure(self, cell: Cell, what: str) -> None:
        began_s = time.monotonic()
        measured, error = None, None
        try:
            measured = self._worker.call(
                self._part.module, "measure", cell.key, timeout_s=min(cell.bound_s, self._deadline.left_s())
            )
        except (ValueError, CellError) as raised:
            if self._is_over(raised):
                return
            error = str(raised)
            self._in_a_row += isinstance(raised, CellError)
        seconds = time.monotonic() - began_s
        self._longest_s = max(self._longest_s, seconds)
        self._store.put(self._part.name, self._row(cell, seconds, measured, error))
        if error is not None:
            self._failures.append(f"{self._part.name}: {cell.key}: {error}")
            self._say(self._line(f"{what}: FAILED: {error}"))
        else:
            assert measured is not None
            self._in_a_row = 0
            noted = self._noted(cell, measured)
            if self._deadline.spent_s - self._said_s >= QUIET_S:
                self._said_s = self._deadline.spent_s
                self._say(self._line(f"{what}: {seconds:.1f} s{noted}"))

    def _is_over(self, error: Exception) -> bool:
        """Whether it was the time of the call, not of the cell, that ended it."""
        return isinstance(error, HungError) and self._deadline.left_s() <= 0

    def _noted(self, cell: Cell, measured: Measured) -> str:
        if not measured.note:
            return ""
        line = f", {measured.note}"
        if measured.merit is not None:
            if self._best is None or measured.merit > self._best[0]:
                self._best = measured.merit, f"{measured.note} ({cell.key})"
            line += f"; best so far {self._best[1]}"
        return line

    def _line(self, text: str) -> str:
        left_s = self._deadline.left_s()
        left = "" if left_s == float("inf") else f", {max(0.0, left_s):.0f} s left"
        return f"[{self._deadline.spent_s:.0f} s{left}] {self._part.name} {text}"

    def _row(self, cell: Cell, seconds: float, measured: Measured | None, error: str | None) -> StoredRow:
        return StoredRow(
            key=cell.key,
            stamp=self._stamp,
            device_name=self._here.device_name,
            versions=dict(self._here.versions),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seconds=seconds,
            values=None if measured is None else measured.values,
            error=error,
        )

    def _state(self, num_cells: int | None) -> PartState:
        done = self._store.values(self._part.name, self._stamp)
        return PartState(
            stamp=self._stamp, num_cells=num_cells, num_done=len(done), failures=tuple(self._failures)
        )
