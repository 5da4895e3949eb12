"""Progress of long work on stderr: steps done, time taken, and the best so far."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

LINE_EVERY_S = 10.0  # interval without a terminal


class Ticker:
    """Progress of one long task, and the best result so far."""

    def at(self, done: int, total: int | None, note: str = "") -> None:
        """Show that `done` of `total` steps are done; None: the total is unknown."""

    def step(self, note: str = "") -> None:
        """Count one step; `note` is shown until the next one."""


class _Bar(Ticker):
    """A progress bar on a terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, done: int, total: int | None, note: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, note=note)

    def step(self, note: str = "") -> None:
        self._progress.update(self._task, advance=1, note=note)


class _Lines(Ticker):
    """Plain lines in a file or a pipe at intervals; none for short tasks."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total, self._done = title, total, 0
        self._began_s = self._written_s = monotonic()

    def at(self, done: int, total: int | None, note: str = "") -> None:
        self._total = total
        self._write(done, note)

    def step(self, note: str = "") -> None:
        self._write(self._done + 1, note)

    def _write(self, done: int, note: str) -> None:
        self._done = done
        now_s = monotonic()
        if now_s - self._written_s < LINE_EVERY_S:
            return
        self._written_s = now_s
        total_text = "" if self._total is None else f" of {self._total}"
        suffix = f", {note}" if note else ""
        sys.stderr.write(f"{self._title}: {done}{total_text} after {now_s - self._began_s:.0f} s{suffix}\n")
        sys.stderr.flush()


@contextmanager
def ticking(title: str, total: int | None, *, quiet: bool) -> Iterator[Ticker]:
    """A progress bar on stderr, or lines if it is no terminal; nothing if `quiet`."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Ticker() if quiet else _Lines(title, total)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, progress.add_task(title, total=total, note=""))
