"""The command that says which models there are."""

from collections.abc import Collection

from rich.table import Table

from workbench.cli.console import emit_json, show
from workbench.cli.options import Json
from workbench.model.families.family import Family
from workbench.model.families.registry import FAMILIES
from workbench.report.tables import titled

HEADERS = ("family", "role", "name", "plans", "runs", "why not")


def models_command(*, json: Json = False) -> None:
    """List the model families: what can be planned, what can run, and why the rest cannot."""
    from runtime.models.choose import ADAPTERS

    if json:
        emit_json({family.name: _record(family, ADAPTERS) for family in FAMILIES})
        return
    show(_table(ADAPTERS))


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
