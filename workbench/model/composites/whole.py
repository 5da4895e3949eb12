"""A composite model of transformers, and which of its parts can be planned."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from workbench.model.composites.registry import COMPOSITES
from workbench.model.families.registry import ARCHITECTURES

ANY = "any"  # the configuration decides, not its class


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
    def is_taken_apart(self) -> bool:
        return self.model_type in COMPOSITES

    @property
    def outcome(self) -> str:
        """The outcome of `workbench init`; where it refuses, which parts can be planned and which cannot."""
        if self.is_taken_apart:
            return "split into modules"
        if not self.parts:
            return "no: its configuration has no sub-models"
        missing = [f"{key} ({kind or 'unnamed'})" for key, kind in self.parts.items() if kind not in _known()]
        if missing:
            return f"no: not supported: {', '.join(missing)}"
        return f"no: cannot combine {', '.join(self.parts)}"


@cache
def _known() -> frozenset[str]:
    """Every model_type that is planned as one module."""
    aliases = {alias for family in ARCHITECTURES.values() for alias in family.aliases}
    return frozenset({ANY, *ARCHITECTURES, *aliases})
