"""A composite model of transformers, and what becomes of it: which of its parts are planned."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from workbench.model.composites.registry import COMPOSITES
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
    def is_taken_apart(self) -> bool:
        return self.model_type in COMPOSITES

    @property
    def outcome(self) -> str:
        """What `workbench init` does with it; where it refuses, which parts are planned and which are not."""
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
    """Of configurations that are planned as one module."""
    aliases = {alias for family in ARCHITECTURES.values() for alias in family.aliases}
    return frozenset({ANY, *ARCHITECTURES, *aliases})
