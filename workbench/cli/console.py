"""How commands speak: one line per error, one JSON object for machines."""

import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from typer.core import TyperGroup

from workbench.ending import Ended, ending_by_signal
from workbench.plain_text import plain

BAD_INPUT = 2  # exit code
PIPE_COLUMNS = 120  # of text that goes to a file or a pipe, where no table is wider
MOST_COLUMNS = 240  # beyond which columns of prose are wrapped


def one_line(error: Exception) -> str:
    """The error's message without line breaks; a failed file operation names its file first."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror}"
    text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    return " ".join(text.split()) or type(error).__name__


def warn(text: str) -> None:
    """One line on stderr about something that will work, but not as well as it could."""
    sys.stderr.write(f"workbench: warning: {plain(text)}\n")


def print_error(text: str) -> None:
    """One line on stderr about what is wrong."""
    sys.stderr.write(f"workbench: error: {plain(text)}\n")


class OneLineErrors(TyperGroup):
    """A command group that turns bad input into one line on stderr and exit code 2.

    Errors of other types are bugs and keep their traceback.
    """

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit."""
        try:
            with ending_by_signal():
                code = super().main(*args, **(extra | {"standalone_mode": False}))
        except (ValueError, OSError, typer.TyperException) as error:
            print_error(one_line(error))
            sys.exit(BAD_INPUT)
        except (typer.Abort, KeyboardInterrupt):
            sys.stderr.write("workbench: interrupted\n")
            sys.exit(130)
        except Ended as ended:
            sys.stderr.write(f"workbench: ended by {ended.name}\n")
            sys.exit(ended.code)
        sys.exit(code if isinstance(code, int) else 0)


def show(*parts: Table | str) -> None:
    """Print for people: as wide as the terminal, or in a file or pipe wide enough for every table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        free = Console(highlight=False, width=MOST_COLUMNS)
        widths = (
            Measurement.get(free, free.options, part).maximum for part in parts if isinstance(part, Table)
        )
        console = Console(highlight=False, width=max(PIPE_COLUMNS, *widths, 0))
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)


def emit_json(result: Mapping[str, Any]) -> None:
    """Print for machines: one object on the last line."""
    sys.stdout.write(json.dumps(result, sort_keys=True) + "\n")
