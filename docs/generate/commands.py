"""Reference of the commands, from the program itself."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args

from typer.testing import CliRunner

from docs.generate.markdown import anchor, code, one_line, page, table
from workbench.cli.app import COMMANDS, app
from workbench.cli.judging import Strategy
from workbench.schedule.choice import ScheduleKind

RULES = """Rules for all commands:

- **Errors.** Invalid input gives one line on stderr and exit code 2.
- **JSON.** `--json` prints one JSON object as the last line, with the full result.
- **Tables.** `--format csv`, `json` or `parquet` prints the rows of the tables, unrounded and in SI
  units. Of several tables, `table` is a key that stays the same, and `title` the title above the table.
  All other text goes to stderr: `workbench search job.yaml --format csv > plans.csv`.
- **Shell.** The flag `--install-completion` of `workbench` itself installs completion of commands, flags
  and choices.
- **Editor.** To complete and check a job file, run `workbench schema job -o job.schema.json` and start
  the job file with `# yaml-language-server: $schema=job.schema.json`.

These modules are run directly; each has `--help`: `python -m runtime.launch` (under `torchrun`),
`python -m runtime.data.dataset`, `python -m runtime.measure.microbench` and the experiments."""

_LISTED = MappingProxyType(  # choices with a page of their own
    {Strategy: "[strategy](strategies.md)", ScheduleKind: "[schedule](schedules.md)"}
)

_WORDS = {Path: "path", str: "text", int: "whole number", float: "number", bool: "flag"}


def commands_page() -> str:
    """The page."""
    listed = list(commands())
    overview = table(("command", "what it does"), (_overview(name, command) for name, command in listed))
    return page("Commands", overview, RULES, *(_section(name, command) for name, command in listed))


def _overview(name: str, command: Any) -> tuple[str, str]:
    return f"[`{name}`](#{anchor(name)})", one_line((command.help or "").partition("\n\n")[0])


def commands() -> Iterator[tuple[str, Any]]:
    """(name, command) of every command; those of a group by both words."""
    for name, listed in COMMANDS.items():
        command = listed.load(name)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {inside}", one) for inside, one in inner.items())


def flags(command: Any) -> set[str]:
    """Every way of writing one of its options."""
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("-")}


def printed(*words: str) -> str:
    """What a command prints where it is run in this process; RuntimeError where it fails."""
    done = CliRunner().invoke(app, words)
    if done.exit_code:
        raise RuntimeError(f"workbench {' '.join(words)}: {done.output}")
    return done.stdout


def _section(name: str, command: Any) -> str:
    about, _, detail = (command.help or "").partition("\b")
    blocks = [f"## {name}", _usage(name, command), one_line(about)]
    if detail.strip():
        blocks.append(f"```text\n{detail.strip()}\n```")
    return "\n\n".join([*blocks, table(("argument or flag", "takes", "default", "meaning"), _rows(command))])


def _usage(name: str, command: Any) -> str:
    arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
    return code(" ".join(["workbench", name, *arguments, "[flags]"]))


def _rows(command: Any) -> Iterator[tuple[str, str, str, str]]:
    for parameter in command.params:
        if parameter.name == "help" or parameter.hidden:
            continue
        is_argument = parameter.param_type_name == "argument"
        spelt = parameter.metavar or parameter.name.upper() if is_argument else ", ".join(parameter.opts)
        yield code(spelt), _takes(parameter), _default(parameter), parameter.help or ""


def _takes(parameter: Any) -> str:
    kind = _kind(parameter)
    many = ", repeatable" if parameter.multiple or parameter.nargs == -1 else ""
    if kind in _LISTED:
        return _LISTED[kind] + many
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(code(member.value) for member in kind) + many
    return _WORDS.get(kind, "text") + many


def _kind(parameter: Any) -> Any:
    """Its type, out of optional and list."""
    kind = parameter.type_descriptor.annotation
    while parts := [part for part in get_args(kind) if part is not NoneType]:
        kind = parts[0]
    return kind


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or value == []:
        return "-"
    return code(value.value if isinstance(value, Enum) else value)
