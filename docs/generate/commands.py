"""Reference of the commands, from the program itself."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from typer.testing import CliRunner

from docs.generate.markdown import code, one_line, page, table
from workbench.cli.app import COMMANDS, app

INTRO = """Every command prints one line and exits with 2 where its input is wrong. Those with `--json`
print one JSON object as their last line, with all that they know. `--format csv`, `json` or `parquet` print
the rows of the tables instead, whole and in SI units, and the rest on stderr: `workbench search job.yaml
--format csv > plans.csv`. The flag `--install-completion` of the program itself makes the shell complete
commands, flags and choices. `workbench schema job -o job.schema.json` and the first line
`# yaml-language-server: $schema=job.schema.json` of a job file make editors complete and check it. Besides
the program there are modules to run: `python -m runtime.launch` under
`torchrun`, `python -m runtime.data.dataset`, `python -m runtime.measure.microbench` and the experiments;
each has `--help`."""

_WORDS = {Path: "path", str: "text", int: "whole number", float: "number", bool: "flag"}


def commands_page() -> str:
    """The page."""
    return page("Commands", INTRO, *(_section(name, command) for name, command in commands()))


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
