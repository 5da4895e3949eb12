"""One line about a large object, which is what a notebook shows of it."""

from typing import Any


class Headline:
    """Base of records whose `repr`, which has every field, is too long to look at; it stays as it is.

    A subclass defines `headline`.
    """

    __slots__ = ()

    @property
    def headline(self) -> str:
        """Kind, name and size in one line."""
        raise NotImplementedError

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001  (IPython's protocol)
        printer.text(self.headline)
