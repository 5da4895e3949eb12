"""The command that says which models there are."""

from collections.abc import Collection

from rich.table import Table

from workbench.cli.console import emit_json, show
from workbench.cli.options import Json
from workbench.model.composites.registry import COMPOSITES
from workbench.model.families.family import Family
from workbench.model.families.registry import FAMILIES
from workbench.report.tables import titled

HEADERS = ("family", "role", "name", "plans", "runs", "why not")


def models_command(*, json: Json = False) -> None:
    """List the model families: what can be planned, what can run, and why the rest cannot.

    Composite models of transformers are listed with what `workbench init` makes of them.
    """
    from runtime.models.choose import ADAPTERS
    from runtime.models.composites import composite_types

    whole = composite_types()
    if json:
        composites = {kind: {"role": "composite", "taken_apart": kind in COMPOSITES} for kind in whole}
        emit_json({family.name: _record(family, ADAPTERS) for family in FAMILIES} | composites)
        return
    show(_table(ADAPTERS), _composites(whole))


def _composites(whole: Collection[str]) -> Table:
    table = titled("composite models", ("model_type", "name", "workbench init"))
    for column in table.columns:
        column.justify = "left"
    table.columns[-1].no_wrap = False
    for kind, composite in COMPOSITES.items():
        table.add_row(kind, composite.name, "takes it apart")
    others = [kind for kind in whole if kind not in COMPOSITES]
    table.add_row("others", "", f"does not know yet: {', '.join(others)}")
    return table


def _record(family: Family, known: Collection[str]) -> dict[str, str | bool | None]:
    return {
        "role": family.role,
        "model_type": family.model_type,
        "zoo": family.zoo,
        "plans": family.plans,
        "runs": family.runs(known),
        "reason": family.reason,
    }


def _table(known: Collection[str]) -> Table:
    table = titled("models", HEADERS)
    for column in table.columns:
        column.justify = "left"
    table.columns[-1].no_wrap = False
    for family in FAMILIES:
        table.add_row(
            family.name,
            family.role,
            family.model_type or family.zoo or "-",
            "yes" if family.plans else "no",
            "yes" if family.runs(known) else "no",
            family.reason,
        )
    return table
