"""How commands speak: one line per error, one JSON object for machines."""

import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from typer.core import TyperGroup

from workbench.compiled import telling
from workbench.finite_json import finite
from workbench.plain_text import plain
from workbench.report.table_rows import Format, written
from workbench.termination import Ended, ending_by_signal

BAD_INPUT = 2  # exit code
PIPE_COLUMNS = 120  # of text that goes to a file or a pipe, where no table is wider
MOST_COLUMNS = 240  # beyond which columns of prose are wrapped
PROSE_COLUMNS = 40  # of a column that may be wrapped
LEAST_ROWS = 2  # that can have something in common
_KEPT: ContextVar[list[Table] | None] = ContextVar("kept", default=None)
"""Tables of the command that runs, where its format is not for people."""


def one_line(error: Exception) -> str:
    """The error's message without line breaks; a failed file operation names its file first."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror}"
    text = _usage(error.format_message()) if isinstance(error, typer.TyperException) else str(error)
    return " ".join(text.split()) or type(error).__name__


def _usage(message: str) -> str:
    """What is wrong with an argument; of a choice that is not there also the nearest one."""
    text = message.replace("Value error, ", "", 1)
    said = re.search(r"'([^']*)' is not one of (.*)\.$", text)
    near = [] if said is None else get_close_matches(said[1], re.findall(r"'([^']*)'", said[2]), n=1)
    return f"{text} Did you mean {near[0]!r}?" if near else text


def warn(text: str) -> None:
    """One line on stderr about something that will work, but not as well as it could."""
    sys.stderr.write(f"workbench: warning: {plain(text)}\n")


def print_error(text: str) -> None:
    """One line on stderr about what is wrong."""
    sys.stderr.write(f"workbench: error: {plain(text)}\n")


def _tell_compiling() -> None:
    """To whoever waits for it."""
    if sys.stderr.isatty():
        sys.stderr.write("workbench: compiling to machine code, about ten seconds, only once\n")


INTERRUPTED = 128 + signal.SIGINT


class OneLineErrors(TyperGroup):
    """A command group that turns bad input into one line on stderr and exit code 2.

    Errors of other types are bugs and keep their traceback.
    """

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit."""
        try:
            with ending_by_signal(), telling(_tell_compiling):
                code = super().main(*args, **(extra | {"standalone_mode": False}))
        except (ValueError, OSError, typer.TyperException) as error:
            print_error(one_line(error))
            sys.exit(BAD_INPUT)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except Ended as ended:
            sys.stderr.write(f"workbench: ended by {ended.name}\n")
            sys.exit(ended.code)
        if code == INTERRUPTED:  # typer makes it of Ctrl-C
            sys.stderr.write("workbench: interrupted\n")
        sys.exit(code if isinstance(code, int) else 0)


def show(*parts: Table | str) -> None:
    """Print for people, or keep tables for the format that was asked for; then texts go to stderr.

    As wide as the terminal, or in a file or pipe wide enough for prose; never so narrow that a figure is cut.
    On a terminal that is narrower, what all rows of a table have in common stands below it.
    """
    kept = _KEPT.get()
    if kept is not None:
        kept.extend(part for part in parts if isinstance(part, Table))
        texts = [part for part in parts if isinstance(part, str)]
        texts += [str(part.caption) for part in parts if isinstance(part, Table) and part.caption]
        sys.stderr.write("".join(f"{plain(text)}\n" for text in texts))
        return
    console = Console(highlight=False, emoji=False)
    if console.is_terminal:
        parts = tuple(_fitted(part, console.width) if isinstance(part, Table) else part for part in parts)
    free = Console(highlight=False, emoji=False, width=MOST_COLUMNS)
    tables = [part for part in parts if isinstance(part, Table)]
    width = max((_uncut_columns(table) for table in tables), default=0)
    if not console.is_terminal:
        widths = (Measurement.get(free, free.options, table).maximum for table in tables)
        width = max(PIPE_COLUMNS, width, *widths)
    console = Console(
        highlight=False, emoji=False, width=max(width, console.width if console.is_terminal else 0)
    )
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)


def _fitted(table: Table, width: int) -> Table:
    """The table, or where it is wider, without columns whose figures are all equal: its caption says them."""
    if _uncut_columns(table) <= width or table.row_count < LEAST_ROWS:
        return table
    kept, shared = table.columns[:1], []
    for column in table.columns[1:]:
        cells = set(map(str, column.cells))
        if len(cells) == 1 and (cell := cells.pop()):
            shared.append(" ".join((*str(column.header).split(), cell)))
        else:
            kept.append(column)
    if not shared:
        return table
    found = copy(table)
    found.columns = [replace(column, _index=index) for index, column in enumerate(kept)]  # rich pads by it
    said = f"same in all rows: {', '.join(shared)}"
    found.caption = f"{said}\n{table.caption}" if table.caption else said
    found.caption_justify = "left"
    return found


def _uncut_columns(table: Table) -> int:
    """Columns of text that a table takes whose figures stand whole; prose is wrapped."""
    width = 1
    for column in table.columns:
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
        widest = max(map(cell_len, lines), default=0)
        width += (widest if column.no_wrap else min(widest, PROSE_COLUMNS)) + 3
    return width


@contextmanager
def in_format(form: Format) -> Iterator[None]:
    """Inside, `show` keeps tables; at the end their rows are written to stdout in this format.

    Raises:
        ValueError: Parquet would go to a terminal.
    """
    if form is Format.TABLE:
        yield
        return
    if form is Format.PARQUET and sys.stdout.isatty():
        raise ValueError("--format parquet is binary: want it in a file, e.g. > table.parquet")
    kept: list[Table] = []
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
        if kept:
            sys.stdout.flush()
            sys.stdout.buffer.write(written(kept, form))
            sys.stdout.flush()


def emit_json(result: Mapping[str, Any]) -> None:
    """Print for machines: one object on the last line; a number that is none, as a loss can be, as text."""
    sys.stdout.write(json.dumps(finite(result), sort_keys=True, allow_nan=False) + "\n")


def print_result(record: Mapping[str, Any], *parts: Table | str, as_json: bool) -> None:
    """Print a result: its record for machines, or tables and texts for people."""
    if as_json:
        emit_json(record)
    else:
        show(*parts)
