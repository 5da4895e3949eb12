"""Modules that are slow to import and seldom used: imported when something of them is first asked for."""

import importlib
from typing import Any


class OnDemand:
    """Stands for a module until then, and passes on whatever is asked of it.

        numba = OnDemand("numba")

    Type checkers are shown the module itself, in the branch of `TYPE_CHECKING` beside it, where its types
    matter.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """Of the module; ImportError where there is none, AttributeError as its own."""
        value = getattr(importlib.import_module(self._module), name)
        vars(self)[name] = value  # the next time there is nothing to ask
        return value
