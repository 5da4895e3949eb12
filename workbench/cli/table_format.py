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


def with_format_flag(command: Command) -> Command:
    """Decorator that adds the flag `--format` to a command that prints tables."""
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
    def with_format(*, table_format: Format, **arguments: Any) -> None:
        if table_format is not Format.TABLE and any(arguments[name] for name in json_flags):
            raise ValueError(f"--json and --format {table_format} exclude each other")
        with in_format(table_format):
            command(**arguments)

    parameters = [parameter.replace(kind=KEYWORD) for parameter in signature.parameters.values()]
    with_format.__annotations__ = command.__annotations__ | {flag.name: hint}
    vars(with_format)["__signature__"] = signature.replace(parameters=[*parameters, flag])
    return with_format
