"""Parameters shared by several commands, and the decorator that turns a dataclass into flags."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.job.run_options import flags_of

Command = Callable[..., None]
KEYWORD = inspect.Parameter.KEYWORD_ONLY
Rule = Callable[[Mapping[str, Any]], Any]  # computes a default from the values of the command's flags

PlanFile = Annotated[Path, typer.Argument(help="plan file", metavar="PLAN")]
ExecutionFile = Annotated[
    Path | None,
    typer.Option("--execution", help="execution file: kernels, rates and host times of the training system"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]
JobFile = Annotated[Path, typer.Argument(help="job file", metavar="JOB")]
RanksPerNode = Annotated[
    int | None,
    typer.Option("--ranks-per-node", min=1, help="processes per node of a `local` cluster; default: 1"),
]
Faults = Annotated[int, typer.Option("--faults", help="number of nodes that may fail at the same moment")]
PlanProfile = Annotated[
    str | None, typer.Option("--profile", help="profile name or file; default: that of the plan's job")
]
Profile = Annotated[str | None, typer.Option(help="profile name or file; replaces the one in the job")]


def with_flags_of(kind: type, **defaults: Any) -> Callable[[Command], Command]:
    """Decorator that replaces a command's parameter of type `kind` with one flag per field of that dataclass.

    The decorated command collects the flags into a `kind` again before it calls the function.

    Args:
        kind: a dataclass whose fields have metadata by `workbench.job.run_options.asked`.
        defaults: by field name, where they differ from the field's own; a `Rule` computes the default of a
            flag that was not given.
    """
    flags = flags_of(kind)
    rules: dict[str, Rule] = {name: rule for name, rule in defaults.items() if callable(rule)}

    def flag_parameters() -> list[inspect.Parameter]:
        parameters = []
        for flag in flags:
            has_rule = flag.field in rules
            value_type: Any = flag.type | None if has_rule else flag.type
            default = None if has_rule else defaults.get(flag.field, flag.default)
            hint = Annotated[value_type, typer.Option(flag.name, help=flag.help)]
            parameters.append(inspect.Parameter(flag.field, KEYWORD, default=default, annotation=hint))
        return parameters

    def expand(command: Command) -> Command:
        signature = inspect.signature(command)
        original = signature.parameters.values()
        [replaced] = [parameter.name for parameter in original if parameter.annotation is kind]

        def with_options(**arguments: Any) -> None:
            bound = expanded.bind(**arguments)
            bound.apply_defaults()
            given = bound.arguments
            resolved = given | {name: rule(given) for name, rule in rules.items() if given[name] is None}
            values = {flag.field: resolved.pop(flag.field) for flag in flags}
            command(**resolved, **{replaced: kind(**values)})

        parameters = [
            new
            for parameter in original
            for new in (
                flag_parameters() if parameter.name == replaced else [parameter.replace(kind=KEYWORD)]
            )
        ]
        with_options.__doc__, with_options.__name__ = command.__doc__, command.__name__
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        expanded = inspect.Signature(parameters)
        vars(with_options)["__signature__"] = expanded
        return with_options

    return expand
