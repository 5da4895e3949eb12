"""A composite model of transformers, and which of its parts can be planned."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.model.composites.registry import COMPOSITES, known_types

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
        known = {ANY, *known_types()}
        missing = [f"{key} ({kind or 'unnamed'})" for key, kind in self.parts.items() if kind not in known]
        if missing:
            return f"no: not supported: {', '.join(missing)}"
        return f"no: cannot combine {', '.join(self.parts)}"
