"""The command that says which models there are."""

from collections.abc import Collection, Sequence

from rich.table import Table

from workbench.cli.console import print_result
from workbench.cli.extras import has_extra, install_text
from workbench.cli.options import Json
from workbench.model.composites.registry import COMPOSITES
from workbench.model.composites.whole import Whole
from workbench.model.families.family import Family
from workbench.model.families.registry import ARCHITECTURES, FAMILIES
from workbench.report.tables import titled

HEADERS = ("family", "role", "name", "plans", "runs", "why not")


def models_command(*, json: Json = False) -> None:
    """List model families: which can be planned, which can run, and why others cannot.

    Also lists the composite models of transformers and what `workbench init` does with them.
    """
    known, whole = _of_runtime()
    composites = {each.model_type: _composite_record(each) for each in whole}
    records = {family.name: _record(family, known) for family in FAMILIES} | composites
    lacking = f"to see what can run, and all composite models: {install_text('run')}"
    lack = (lacking,) if known is None else ()
    print_result(records, _table(known), _composites(whole, known), *lack, as_json=json)


def _of_runtime() -> tuple[Collection[str] | None, Sequence[Whole]]:
    """Architectures that can run, None where no runtime is installed; composites that are known here."""
    if not has_extra("run"):
        return None, [Whole(model_type=kind, parts={}) for kind in sorted(COMPOSITES)]
    from runtime.models.choose import ADAPTERS
    from runtime.models.composites import composite_models

    return ADAPTERS, composite_models()


def _composite_record(whole: Whole) -> dict[str, object]:
    return {
        "role": "composite",
        "taken_apart": whole.is_taken_apart,
        "parts": dict(whole.parts),
        "outcome": whole.outcome,
    }


def _words(title: str, headers: Sequence[str]) -> Table:
    """An empty table of words: left-aligned, and what stands last may wrap."""
    table = titled(title, headers)
    for column in table.columns:
        column.justify = "left"
    table.columns[-1].no_wrap = False
    return table


def _composites(whole: Sequence[Whole], known: Collection[str] | None) -> Table:
    """Those that are taken apart first."""
    table = _words("composite models of transformers", ("model_type", "name", "workbench init"))
    for each in sorted(whole, key=lambda one: (not one.is_taken_apart, one.model_type)):
        name = COMPOSITES[each.model_type].name if each.is_taken_apart else ""
        stuck = [] if known is None or not each.is_taken_apart else _stuck(each, known)
        outcome = f"{each.outcome}; planned, not run: {', '.join(stuck)}" if stuck else each.outcome
        table.add_row(each.model_type, name, outcome)
    return table


def _stuck(whole: Whole, known: Collection[str]) -> list[str]:
    """Parts of families that are planned and cannot run, by the names of the table above."""
    kinds = whole.parts.values()
    return [kind for kind, family in ARCHITECTURES.items() if kind in kinds and not family.runs(known)]


def _record(family: Family, known: Collection[str] | None) -> dict[str, str | bool | None]:
    return {
        "role": family.role,
        "model_type": family.model_type,
        "zoo": family.zoo,
        "plans": family.plans,
        "runs": None if known is None else family.runs(known),
        "reason": family.reason,
    }


def _table(known: Collection[str] | None) -> Table:
    table = _words("models", HEADERS)
    for family in FAMILIES:
        table.add_row(
            family.name,
            family.role,
            family.model_type or family.zoo or "-",
            "yes" if family.plans else "no",
            "?" if known is None else "yes" if family.runs(known) else "no",
            family.reason,
        )
    return table
