"""Progress of long work, on stderr: how far it is, how long it has taken, and what is best so far."""

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

LINE_EVERY_S = 10.0  # where nothing can be drawn


class Ticker:
    """Progress of one long task: how far it is, and the best result so far."""

    def at(self, done: int, total: int | None, note: str = "") -> None:
        """Show that `done` of `total` steps are over; None: nobody knows of how many."""

    def step(self, note: str = "") -> None:
        """One step done; `note` is shown until the next one."""


class _Bar(Ticker):
    """On a terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, done: int, total: int | None, note: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, note=note)

    def step(self, note: str = "") -> None:
        self._progress.update(self._task, advance=1, note=note)


class _Lines(Ticker):
    """In a file or a pipe: a plain line now and then, none for what is soon over."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total, self._done = title, total, 0
        self._began_s = self._told_s = monotonic()

    def at(self, done: int, total: int | None, note: str = "") -> None:
        self._total = total
        self._tell(done, note)

    def step(self, note: str = "") -> None:
        self._tell(self._done + 1, note)

    def _tell(self, done: int, note: str) -> None:
        self._done = done
        now_s = monotonic()
        if now_s - self._told_s < LINE_EVERY_S:
            return
        self._told_s = now_s
        of = "" if self._total is None else f" of {self._total}"
        said = f", {note}" if note else ""
        sys.stderr.write(f"{self._title}: {done}{of} after {now_s - self._began_s:.0f} s{said}\n")
        sys.stderr.flush()


@contextmanager
def ticking(title: str, total: int | None, *, quiet: bool) -> Iterator[Ticker]:
    """A progress bar on stderr, or lines where it is no terminal; nothing where `quiet` is set."""
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
