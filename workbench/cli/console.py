"""How commands speak: one line per error, progress on stderr, one JSON object for machines."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

BAD_INPUT = 2  # exit code
PIPE_COLUMNS = 120  # of text that goes to a file or a pipe


def one_line(error: Exception) -> str:
    """The error's message without line breaks; a failed file operation names its file first."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror}"
    text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    return " ".join(text.split()) or type(error).__name__


def warn(text: str) -> None:
    """One line on stderr about something that will work, but not as well as it could."""
    sys.stderr.write(f"workbench: warning: {text}\n")


def print_error(text: str) -> None:
    """One line on stderr about what is wrong."""
    sys.stderr.write(f"workbench: error: {text}\n")


class OneLineErrors(TyperGroup):
    """A command group that turns bad input into one line on stderr and exit code 2.

    Errors of other types are bugs and keep their traceback.
    """

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit."""
        try:
            code = super().main(*args, **(extra | {"standalone_mode": False}))
        except (ValueError, OSError, typer.TyperException) as error:
            print_error(one_line(error))
            sys.exit(BAD_INPUT)
        except (typer.Abort, KeyboardInterrupt):
            sys.stderr.write("workbench: interrupted\n")
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


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


def show(*parts: Table | str) -> None:
    """Print for people: as wide as the terminal, or wide enough for every table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)


def emit_json(result: Mapping[str, Any]) -> None:
    """Print for machines: one object on the last line."""
    sys.stdout.write(json.dumps(result, sort_keys=True) + "\n")
