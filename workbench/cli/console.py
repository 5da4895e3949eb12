"""Output of commands: tables and texts, one line per error or warning, one JSON object for programs."""

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

BAD_INPUT = 2  # exit code of invalid input
PIPE_COLUMNS = 120  # minimum width of output to a file or a pipe
MAX_COLUMNS = 240  # width at which columns of prose are wrapped
PROSE_COLUMNS = 40  # minimum width of a column that may be wrapped
MIN_ROWS = 2  # of a table whose constant columns move to the caption
MOST_CHARACTERS = 900  # of a line on stderr: a refusal names rank, moment, holders and remedies in some 400
MOST_STAGES = 64  # rows of a table of stages or programs that are printed
_COLLECTED: ContextVar[list[Table] | None] = ContextVar("collected", default=None)
"""Tables of the running command if they are written in a format for programs; None: they are printed."""


def one_line(error: Exception) -> str:
    """The error's message without line breaks; a failed file operation is preceded by its file."""
    if isinstance(error, OSError) and error.strerror:
        prefix = f"{error.filename}: " if error.filename else ""
        return f"{prefix}{error.strerror}"
    text = _usage_error(error.format_message()) if isinstance(error, typer.TyperException) else str(error)
    return " ".join(text.split()) or type(error).__name__


def _usage_error(message: str) -> str:
    """The message of a usage error; for an invalid choice with the nearest valid one."""
    text = message.replace("Value error, ", "", 1)
    choice_error = re.search(r"'([^']*)' is not one of (.*)\.$", text)
    nearest = (
        []
        if choice_error is None
        else get_close_matches(choice_error[1], re.findall(r"'([^']*)'", choice_error[2]), n=1)
    )
    return f"{text} Did you mean {nearest[0]!r}?" if nearest else text


def warn(text: str) -> None:
    """Print a warning as one line on stderr."""
    sys.stderr.write(f"workbench: warning: {plain(text, MOST_CHARACTERS)}\n")


def print_error(text: str) -> None:
    """Print an error as one line on stderr."""
    sys.stderr.write(f"workbench: error: {plain(text, MOST_CHARACTERS)}\n")


def _report_compiling() -> None:
    """Explain the wait on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write("workbench: compiling to machine code, about ten seconds, only once\n")


INTERRUPTED_CODE = 128 + signal.SIGINT


class OneLineErrors(TyperGroup):
    """A command group that reports invalid input as one line on stderr, with exit code 2.

    Errors of other types are bugs and keep their traceback.
    """

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit."""
        try:
            with ending_by_signal(), telling(_report_compiling):
                code = super().main(*args, **(extra | {"standalone_mode": False}))
        except (ValueError, OSError, typer.TyperException) as error:
            print_error(one_line(error))
            sys.exit(BAD_INPUT)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED_CODE
        except Ended as ended:
            sys.stderr.write(f"workbench: ended by {ended.name}\n")
            sys.exit(ended.code)
        if code == INTERRUPTED_CODE:  # typer's code for Ctrl-C
            sys.stderr.write("workbench: interrupted\n")
        sys.exit(code if isinstance(code, int) else 0)


def is_for_programs() -> bool:
    """Whether tables are written in a format for programs, which wants every row."""
    return _COLLECTED.get() is not None


def first_rows(table: Table) -> Table:
    """The table; printed, it has at most `MOST_STAGES` rows, and its caption says how to see the others.

    Inside `in_format` it keeps all rows.
    """
    if table.row_count <= MOST_STAGES or is_for_programs():
        return table
    cut = copy(table)
    cut.rows = table.rows[:MOST_STAGES]
    cut.columns = [replace(column, _cells=list(column.cells)[:MOST_STAGES]) for column in table.columns]
    cut.caption = f"{table.row_count - MOST_STAGES:,} more rows; --format csv prints all"
    cut.caption_justify = "left"
    return cut


def show(*parts: Table | str) -> None:
    """Print tables and texts; inside `in_format` collect the tables and print the texts on stderr.

    The width is that of the terminal, or at least `PIPE_COLUMNS` in a file or pipe; it is never so small
    that a figure is cut. In a table wider than the terminal, constant columns move to the caption.
    """
    collected = _COLLECTED.get()
    if collected is not None:
        collected.extend(part for part in parts if isinstance(part, Table))
        texts = [part for part in parts if isinstance(part, str)]
        for table in parts:
            if isinstance(table, Table) and table.caption:
                texts += str(table.caption).splitlines()
        sys.stderr.write("".join(f"{plain(text, MOST_CHARACTERS)}\n" for text in texts))
        return
    console = Console(highlight=False, emoji=False)
    if console.is_terminal:
        parts = tuple(
            _without_constant_columns(part, console.width) if isinstance(part, Table) else part
            for part in parts
        )
    wide_console = Console(highlight=False, emoji=False, width=MAX_COLUMNS)
    tables = [part for part in parts if isinstance(part, Table)]
    width = max((_min_width(table) for table in tables), default=0)
    if not console.is_terminal:
        widths = (Measurement.get(wide_console, wide_console.options, table).maximum for table in tables)
        width = max(PIPE_COLUMNS, width, *widths)
    console = Console(
        highlight=False, emoji=False, width=max(width, console.width if console.is_terminal else 0)
    )
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)


def _without_constant_columns(table: Table, width: int) -> Table:
    """The table; if it is wider than `width`, without constant columns, whose values go to the caption."""
    if _min_width(table) <= width or table.row_count < MIN_ROWS:
        return table
    varying, shared = table.columns[:1], []
    for column in table.columns[1:]:
        cells = set(map(str, column.cells))
        if len(cells) == 1 and (cell := cells.pop()):
            shared.append(" ".join((*str(column.header).split(), cell)))
        else:
            varying.append(column)
    if not shared:
        return table
    narrowed = copy(table)
    # rich pads columns by their index
    narrowed.columns = [replace(column, _index=index) for index, column in enumerate(varying)]
    caption = f"same in all rows: {', '.join(shared)}"
    narrowed.caption = f"{caption}\n{table.caption}" if table.caption else caption
    narrowed.caption_justify = "left"
    return narrowed


def _min_width(table: Table) -> int:
    """Smallest width in characters of a table in which no figure is cut; prose may be wrapped."""
    width = 1
    for column in table.columns:
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
        widest = max(map(cell_len, lines), default=0)
        width += (widest if column.no_wrap else min(widest, PROSE_COLUMNS)) + 3
    return width


@contextmanager
def in_format(table_format: Format) -> Iterator[None]:
    """Context in which `show` collects tables; at its end their rows are written to stdout in this format.

    Raises:
        ValueError: Parquet output to a terminal.
    """
    if table_format is Format.TABLE:
        yield
        return
    if table_format is Format.PARQUET and sys.stdout.isatty():
        raise ValueError("--format parquet is binary: want it in a file, e.g. > table.parquet")
    collected: list[Table] = []
    token = _COLLECTED.set(collected)
    try:
        yield
    finally:
        _COLLECTED.reset(token)
        if collected:
            sys.stdout.flush()
            sys.stdout.buffer.write(written(collected, table_format))
            sys.stdout.flush()


def emit_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object as the last line; numbers that are not finite, such as a loss, are strings."""
    sys.stdout.write(json.dumps(finite(result), sort_keys=True, allow_nan=False) + "\n")


def print_result(record: Mapping[str, Any], *parts: Table | str, as_json: bool) -> None:
    """Print a result: its record as JSON, or tables and texts."""
    if as_json:
        emit_json(record)
    else:
        show(*parts)
