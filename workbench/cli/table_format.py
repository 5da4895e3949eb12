"""The flag `--format` of commands that print tables."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from workbench.cli.console import in_format
from workbench.report.table_rows import Format

Command = Callable[..., None]
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def lists(command: Command) -> Command:
    """Gives a command that prints tables the flag `--format`."""
    signature = inspect.signature(command)
    hint = Annotated[
        Format,
        typer.Option(
            "--format", help="format of the tables; other than table, all other text goes to stderr"
        ),
    ]
    flag = inspect.Parameter("table_format", KEYWORD, default=Format.TABLE, annotation=hint)
    json_flags = [name for name in ("as_json", "json") if name in signature.parameters]

    @wraps(command)
    def listing(*, table_format: Format, **said: Any) -> None:
        if table_format is not Format.TABLE and any(said[name] for name in json_flags):
            raise ValueError(f"--json and --format {table_format} exclude each other")
        with in_format(table_format):
            command(**said)

    parameters = [each.replace(kind=KEYWORD) for each in signature.parameters.values()]
    listing.__annotations__ = command.__annotations__ | {flag.name: hint}
    vars(listing)["__signature__"] = signature.replace(parameters=[*parameters, flag])
    return listing
