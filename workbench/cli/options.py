"""Parameters that several commands share."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.job.run_options import flags_of

Command = Callable[..., None]
KEYWORD = inspect.Parameter.KEYWORD_ONLY
Rule = Callable[[Mapping[str, Any]], Any]  # a default that follows from what else was said

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


def takes(kind: type, **defaults: Any) -> Callable[[Command], Command]:
    """Makes a command's parameter of this dataclass into flags, one for each of its fields.

    Args:
        kind: of `workbench.job.run_options`.
        defaults: where they are not the fields' own; a `Rule` finds one for what was not said.
    """
    flags = flags_of(kind)
    rules: dict[str, Rule] = {name: rule for name, rule in defaults.items() if callable(rule)}

    def flag_parameters() -> list[inspect.Parameter]:
        found = []
        for flag in flags:
            is_ruled = flag.field in rules
            typed: Any = flag.type | None if is_ruled else flag.type
            default = None if is_ruled else defaults.get(flag.field, flag.default)
            hint = Annotated[typed, typer.Option(flag.name, help=flag.help)]
            found.append(inspect.Parameter(flag.field, KEYWORD, default=default, annotation=hint))
        return found

    def expand(command: Command) -> Command:
        signature = inspect.signature(command)
        own = signature.parameters.values()
        [name_of_kind] = [parameter.name for parameter in own if parameter.annotation is kind]

        def taking(**given: Any) -> None:
            bound = flagged.bind(**given)
            bound.apply_defaults()
            said = bound.arguments
            asked = said | {name: rule(said) for name, rule in rules.items() if said[name] is None}
            values = {flag.field: asked.pop(flag.field) for flag in flags}
            command(**asked, **{name_of_kind: kind(**values)})

        parameters = [
            each
            for parameter in own
            for each in (
                flag_parameters() if parameter.name == name_of_kind else [parameter.replace(kind=KEYWORD)]
            )
        ]
        taking.__doc__, taking.__name__ = command.__doc__, command.__name__
        taking.__annotations__ = {each.name: each.annotation for each in parameters}
        flagged = inspect.Signature(parameters)
        vars(taking)["__signature__"] = flagged
        return taking

    return expand
