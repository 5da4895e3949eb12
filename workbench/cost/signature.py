"""The signature of a layer: what two layers must share to take the same time on one machine."""

from dataclasses import MISSING, fields
from hashlib import sha256

from workbench.model.layer import Layer, Operator


def signature(layer: Layer) -> str:
    """Kind and a digest of the operators, e.g. `"block-5f0c9a61d2be"`.

    Independent of the layer's name, of tied names and of trainability; stable across runs
    and Python versions, and when operators gain fields, as those at their default are left
    out. Operator names count, since they tell a GELU from a SiLU.

    Complexity: O(operators).
    """
    text = "\n".join([f"{layer.kind} {layer.out_width} {layer.emits}", *map(_describe, layer.operators)])
    return f"{layer.kind}-{sha256(text.encode()).hexdigest()[:12]}"


class Signatures:
    """Signatures looked up by the identity of the operators, which equal blocks of a model share."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[tuple[Operator, ...], str]] = {}

    def of(self, layer: Layer) -> str:
        """As `signature`."""
        key = id(layer.operators), layer.kind, layer.out_width, layer.emits
        found = self._known.get(key)
        if found is None or found[0] is not layer.operators:  # a number out of another process
            found = self._known[key] = layer.operators, signature(layer)  # held: the identity stays theirs
        return found[1]


def _describe(operator: Operator) -> str:
    values = [(field, getattr(operator, field.name)) for field in fields(operator)]
    said = [
        f"{field.name}={value}"
        for field, value in values
        if field.default is MISSING or value != field.default
    ]
    return " ".join([type(operator).__name__, *said])
