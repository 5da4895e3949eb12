"""Which part of a module is trained."""

from dataclasses import replace
from enum import StrEnum

from workbench.model.layer import Layer, LayerKind
from workbench.model.model_graph import Module


class Trainable(StrEnum):
    """ALL: every layer. PROJECTOR: the projector alone. NONE: the module is frozen."""

    ALL = "all"
    PROJECTOR = "projector"
    NONE = "none"


def with_trainable(module: Module, trainable: Trainable) -> Module:
    """The module with every layer's trainable flag set.

    The projector layer also contains the encoder's final norm; both follow its flag.

    Raises:
        ValueError: PROJECTOR for a module without a projector.
    """
    if trainable is Trainable.PROJECTOR and all(
        layer.kind is not LayerKind.PROJECTOR for layer in module.layers
    ):
        raise ValueError(
            f"module {module.name!r}: trainable 'projector' needs a projector layer and it has none; "
            "want 'all' or 'none'"
        )
    return replace(module, layers=tuple(_flagged(layer, trainable) for layer in module.layers))


def _flagged(layer: Layer, trainable: Trainable) -> Layer:
    on = trainable is Trainable.ALL or (
        trainable is Trainable.PROJECTOR and layer.kind is LayerKind.PROJECTOR
    )
    return replace(layer, trainable=on)
