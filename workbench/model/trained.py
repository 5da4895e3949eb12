"""Which weights of a layer are trained: all but an indexer's, none, or those of its adapters alone."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from workbench.model.block_modules import reads_alike
from workbench.model.indexer import is_of_indexer
from workbench.model.layer import Layer, Matmul, Operator, Parameter
from workbench.model.lora import Lora, is_of_adapter


def is_trained(layer: Layer) -> bool:
    """Whether any weights of the layer are trained."""
    return layer.trainable or layer.has_adapters


def trains(layer: Layer, parameter: Parameter) -> bool:
    """Whether a parameter of the layer is trained."""
    return is_trained_by_name(parameter.name, is_trainable=layer.trainable)


def is_trained_by_name(parameter: str, *, is_trainable: bool) -> bool:
    """Whether a parameter of this name is trained, in a layer that is trainable or not."""
    return (is_trainable and not is_of_indexer(parameter)) or is_of_adapter(parameter)


def trained_parameters(layer: Layer) -> tuple[Parameter, ...]:
    """The layer's trained weights, in order; tied ones under their shared name."""
    return trainable_parameters(layer) if is_trained(layer) else ()


def frozen_parameters(layer: Layer) -> tuple[Parameter, ...]:
    """The layer's other weights."""
    if layer.trainable and not layer.has_indexer:
        return ()
    return tuple(parameter for parameter in layer.parameters() if not trains(layer, parameter))


def trainable_parameters(layer: Layer) -> tuple[Parameter, ...]:
    """The weights that are trained where any of the layer are: those of its adapters, or all others' too."""
    return _trainable(layer, layer.parameters())


def trainable_in(layer: Layer, operator: Operator) -> tuple[Parameter, ...]:
    """Those of one operator of the layer."""
    return _trainable(layer, operator.parameters())


def has_trainable(layer: Layer, operator: Operator) -> bool:
    """Whether an operator of the layer has any of them."""
    return bool(adapter_of(operator) if layer.has_adapters else trainable_in(layer, operator))


def _trainable(layer: Layer, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    if not layer.has_adapters and not layer.has_indexer:
        return parameters
    is_trainable = not layer.has_adapters
    return tuple(each for each in parameters if is_trained_by_name(each.name, is_trainable=is_trainable))


def num_weights(layers: Iterable[Layer]) -> int:
    """The number of weights in layers of one module; tied ones counted once."""
    return _num_elements(p for layer in layers for p in layer.parameters())


def num_trained(layers: Iterable[Layer]) -> int:
    """The number of trained weights in layers of one module; tied ones counted once."""
    return _num_elements(p for layer in layers for p in trained_parameters(layer))


def _num_elements(parameters: Iterable[Parameter]) -> int:
    return sum({parameter.name: parameter.num_elements for parameter in parameters}.values())


def first_trained(layer: Layer) -> int:
    """Index of the operator behind which gradients run wherever weights of the layer are trained.

    The first with weights, or the last product that reads what the first adapter reads; the number of
    operators where none has weights. Gradients run through all later operators, whether or not the layer's
    input needs one.
    """
    if not layer.has_adapters:
        return layer.first_with_weights
    operators = layer.operators
    index = next(index for index, operator in enumerate(operators) if adapter_of(operator))
    while index + 1 < len(operators) and reads_alike(operators[index], operators[index + 1]):
        index += 1
    return index


def adapter_of(operator: Operator) -> tuple[Matmul, ...]:
    """The two products of an operator's adapter; none where it has none."""
    return operator.adapter if isinstance(operator, Matmul) else ()


def adapted_products(layers: Iterable[Layer]) -> dict[str, Lora]:
    """Name of a product -> its adapter, for products of these layers that have one."""
    return {
        operator.name: operator.lora
        for layer in layers
        for operator in layer.operators
        if isinstance(operator, Matmul) and operator.lora is not None
    }


def without_adapters(layer: Layer) -> Layer:
    """The layer as it is without its adapters, frozen; the layer itself where it has none."""
    return replace(layer, operators=_bare(layer.operators)) if layer.has_adapters else layer


@lru_cache(maxsize=1024)
def _bare(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    return tuple(replace(each, lora=None) if isinstance(each, Matmul) else each for each in operators)
