"""The signature of a layer: equal for layers that take the same time on one machine."""

from dataclasses import MISSING, fields
from hashlib import sha256

from workbench.model.layer import Layer, Operator


def signature(layer: Layer) -> str:
    """Kind and a digest of the operators, e.g. `"block-5f0c9a61d2be"`.

    Independent of the layer's name, tied names and trainability; stable across runs, Python versions and
    new fields of operators, as fields at their defaults are left out. Operator names count, since they
    distinguish a GELU from a SiLU.

    Complexity: O(operators).
    """
    text = "\n".join([f"{layer.kind} {layer.out_width} {layer.emits}", *map(_describe, layer.operators)])
    return f"{layer.kind}-{sha256(text.encode()).hexdigest()[:12]}"


class Signatures:
    """A cache of signatures by the identity of the operators, which equal blocks of a model share."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[tuple[Operator, ...], str]] = {}

    def of(self, layer: Layer) -> str:
        """As `signature`."""
        key = id(layer.operators), layer.kind, layer.out_width, layer.emits
        entry = self._known.get(key)
        if entry is None or entry[0] is not layer.operators:  # an id from another process
            entry = self._known[key] = (
                layer.operators,
                signature(layer),
            )  # keeps operators alive, so the id stays theirs
        return entry[1]


def _describe(operator: Operator) -> str:
    values = [(field, getattr(operator, field.name)) for field in fields(operator)]
    parts = [
        f"{field.name}={value}"
        for field, value in values
        if field.default is MISSING or value != field.default
    ]
    return " ".join([type(operator).__name__, *parts])
