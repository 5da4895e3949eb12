"""A number in a table: as people read it, with its values for machines."""

from collections.abc import Mapping
from typing import Any


class Figure(str):
    """Text of a cell that carries its values.

    Args:
        text: for people, rounded and with a unit.
        values: for machines, SI units, by the suffix that their columns add to the header: `{"s": 0.0123}`;
            a value without a unit has the name "".
    """

    values: Mapping[str, Any]

    def __new__(cls, text: str, values: Mapping[str, Any]) -> "Figure":
        figure = super().__new__(cls, text)
        figure.values = values
        return figure
