"""Lazy imports of modules that are slow to import and seldom used."""

import importlib
from typing import Any


class OnDemand:
    """A proxy for a module, which is imported at the first access to an attribute.

        numba = OnDemand("numba")

    Where its types matter, a `TYPE_CHECKING` branch shows type checkers the module itself.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module; ImportError where the module is missing, AttributeError as usual."""
        value = getattr(importlib.import_module(self._module), name)
        vars(self)[name] = value  # later accesses bypass this method
        return value
