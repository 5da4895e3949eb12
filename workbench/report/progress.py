"""Progress of long work, on stderr: how far it is, how long it has taken, and what is best so far."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Ticker:
    """Progress of one long task: how far it is, and the best result so far."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps are over."""
        self._progress.update(self._task, completed=done, total=total, note=note)

    def step(self, note: str = "") -> None:
        """One step done; `note` is shown behind the bar until the next one."""
        self._progress.update(self._task, advance=1, note=note)


@contextmanager
def ticking(title: str, total: int | None, *, quiet: bool) -> Iterator[Ticker]:
    """A progress bar on stderr; nothing is drawn when stderr is no terminal or `quiet` is set."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        yield Ticker(progress, progress.add_task(title, total=total, note=""))
