"""The command that says which models there are."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from workbench.cli.console import emit_json, show
from workbench.cli.options import Json
from workbench.model.composites.registry import COMPOSITES
from workbench.model.families.family import Family
from workbench.model.families.registry import FAMILIES
from workbench.report.tables import titled

if TYPE_CHECKING:
    from runtime.models.composites import Whole

HEADERS = ("family", "role", "name", "plans", "runs", "why not")


def models_command(*, json: Json = False) -> None:
    """List the model families: what can be planned, what can run, and why the rest cannot.

    Composite models of transformers are listed with what `workbench init` makes of them.
    """
    from runtime.models.choose import ADAPTERS
    from runtime.models.composites import composite_models

    whole = composite_models()
    if json:
        composites = {
            each.model_type: {
                "role": "composite",
                "taken_apart": each.is_taken_apart,
                "parts": dict(each.parts),
                "outcome": each.outcome,
            }
            for each in whole
        }
        emit_json({family.name: _record(family, ADAPTERS) for family in FAMILIES} | composites)
        return
    show(_table(ADAPTERS), _composites(whole))


def _composites(whole: "Sequence[Whole]") -> Table:
    """Those that are taken apart first."""
    table = titled("composite models of transformers", ("model_type", "name", "workbench init"))
    for column in table.columns:
        column.justify = "left"
    table.columns[-1].no_wrap = False
    for each in sorted(whole, key=lambda one: (not one.is_taken_apart, one.model_type)):
        name = COMPOSITES[each.model_type].name if each.is_taken_apart else ""
        table.add_row(each.model_type, name, each.outcome)
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
