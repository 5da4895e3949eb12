"""Composite models that the installed transformers knows, and which of their parts are planned."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from workbench.model.composites.registry import COMPOSITES, TAKEN_APART
from workbench.model.families.registry import ARCHITECTURES

ANY = "any"  # what a configuration says, not its class


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One composite.

    Args:
        model_type: of its configuration.
        parts: key of a configuration inside it -> its model_type, or `ANY`.
    """

    model_type: str
    parts: Mapping[str, str]

    @property
    def outcome(self) -> str:
        """What `workbench init` does with it; where it refuses, which parts are planned and which are not."""
        if self.model_type in COMPOSITES:
            return TAKEN_APART
        if not self.parts:
            return "no: its configuration names no parts"
        missing = [f"{key} ({kind or 'unnamed'})" for key, kind in self.parts.items() if kind not in _known()]
        if missing:
            return f"no: no family plans {', '.join(missing)}"
        return f"no: no rule joins {', '.join(self.parts)}"


def composite_models() -> tuple[Whole, ...]:
    """Every configuration with configurations inside, and every model of text and something else; sorted."""
    found = {kind: _parts(kind) for kind in CONFIG_MAPPING}
    named = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    whole = {kind for names in named for kind in names} | {kind for kind, parts in found.items() if parts}
    return tuple(Whole(model_type=kind, parts=found.get(kind, {})) for kind in sorted(whole))


def _parts(kind: str) -> dict[str, str]:
    inner = CONFIG_MAPPING[kind].sub_configs
    return {key: ANY if made is AutoConfig else str(made.model_type) for key, made in inner.items()}


@cache
def _known() -> frozenset[str]:
    """Of configurations that are planned as one module."""
    aliases = {alias for family in ARCHITECTURES.values() for alias in family.aliases}
    return frozenset({ANY, *ARCHITECTURES, *aliases})
