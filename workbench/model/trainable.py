"""Which part of a module is trained."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache

from workbench.model.experts import num_experts
from workbench.model.layer import Layer, LayerKind, Matmul, Operator
from workbench.model.lora import Adapted, Lora, is_adapted
from workbench.model.model_graph import Module

MERGER = "deepstack."  # begins the names of a merger's operators


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


def num_frozen_mergers(module: Module) -> int:
    """Frozen blocks with a merger of their own (DeepStack), in a module whose projector is trained."""
    if not any(layer.trainable and layer.kind is LayerKind.PROJECTOR for layer in module.layers):
        return 0
    return sum(
        not layer.trainable and any(each.name.startswith(MERGER) for each in layer.operators)
        for layer in module.layers
    )


def with_adapters(module: Module, lora: Lora, modules: Adapted) -> Module:
    """The module with an adapter beside each of these products of its frozen blocks.

    As with PEFT's `target_modules`, products of embedding, projector and head have none, nor have
    convolutions, routers and DeepStack mergers.

    Raises:
        ValueError: trained blocks, none of these products, or experts among them.
    """
    blocks = [layer for layer in module.layers if layer.kind is LayerKind.BLOCK]
    if any(layer.trainable for layer in blocks):
        raise ValueError(
            f"module {module.name!r}: lora trains adapters of frozen blocks; want trainable 'none' or "
            "'projector', got 'all'"
        )
    if modules in (Adapted.ALL, Adapted.MLP) and any(map(num_experts, blocks)):
        raise ValueError(
            f"module {module.name!r}: experts have no adapters, as their weights are one tensor; want lora "
            f"modules 'attention' or 'qkv', got {modules.value!r}"
        )

    layers = adapted_layers(module.layers, lora, modules)
    if not any(layer.has_adapters for layer in layers):
        raise ValueError(
            f"module {module.name!r}: its blocks have no products of lora modules {modules.value!r}"
        )
    return replace(module, layers=layers)


def adapted_layers(layers: Sequence[Layer], lora: Lora, modules: Adapted) -> tuple[Layer, ...]:
    """The layers with an adapter beside each of these products of their blocks."""

    @cache
    def adapted(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        return tuple(
            replace(each, lora=lora) if isinstance(each, Matmul) and is_adapted(each.name, modules) else each
            for each in operators
        )

    return tuple(
        replace(layer, operators=adapted(layer.operators)) if layer.kind is LayerKind.BLOCK else layer
        for layer in layers
    )
