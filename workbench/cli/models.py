"""The command that lists the supported models: models."""

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
    runnable, composite_models = _known_models()
    composites = {model.model_type: _composite_record(model) for model in composite_models}
    records = {family.name: _record(family, runnable) for family in FAMILIES} | composites
    hint = f"to see what can run, and all composite models: {install_text('run')}"
    hints = (hint,) if runnable is None else ()
    print_result(records, _table(runnable), _composites(composite_models, runnable), *hints, as_json=json)


def _known_models() -> tuple[Collection[str] | None, Sequence[Whole]]:
    """Architectures that can run, None if the runtime is not installed; and the known composite models."""
    if not has_extra("run"):
        return None, [Whole(model_type=kind, parts={}) for kind in sorted(COMPOSITES)]
    from runtime.models.choose import ADAPTERS
    from runtime.models.composites import composite_models

    return ADAPTERS, composite_models()


def _composite_record(model: Whole) -> dict[str, object]:
    return {
        "role": "composite",
        "taken_apart": model.is_taken_apart,
        "parts": dict(model.parts),
        "outcome": model.outcome,
    }


def _text_table(title: str, headers: Sequence[str]) -> Table:
    """An empty table of left-aligned text, whose last column may wrap."""
    table = titled(title, headers)
    for column in table.columns:
        column.justify = "left"
    table.columns[-1].no_wrap = False
    return table


def _composites(models: Sequence[Whole], runnable: Collection[str] | None) -> Table:
    """Table of the composite models, those that `workbench init` splits first."""
    table = _text_table("composite models of transformers", ("model_type", "name", "workbench init"))
    for model in sorted(models, key=lambda model: (not model.is_taken_apart, model.model_type)):
        name = COMPOSITES[model.model_type].name if model.is_taken_apart else ""
        unrunnable = [] if runnable is None or not model.is_taken_apart else _parts_not_run(model, runnable)
        outcome = (
            f"{model.outcome}; planned, not run: {', '.join(unrunnable)}" if unrunnable else model.outcome
        )
        table.add_row(model.model_type, name, outcome)
    return table


def _parts_not_run(model: Whole, runnable: Collection[str]) -> list[str]:
    """Parts of a composite model that can be planned but not run, by `model_type`."""
    kinds = model.parts.values()
    return [kind for kind, family in ARCHITECTURES.items() if kind in kinds and not family.runs(runnable)]


def _record(family: Family, runnable: Collection[str] | None) -> dict[str, str | bool | None]:
    return {
        "role": family.role,
        "model_type": family.model_type,
        "zoo": family.zoo,
        "plans": family.plans,
        "runs": None if runnable is None else family.runs(runnable),
        "reason": family.reason,
    }


def _table(runnable: Collection[str] | None) -> Table:
    table = _text_table("models", HEADERS)
    for family in FAMILIES:
        table.add_row(
            family.name,
            family.role,
            family.model_type or family.zoo or "-",
            "yes" if family.plans else "no",
            "?" if runnable is None else "yes" if family.runs(runnable) else "no",
            family.reason,
        )
    return table
