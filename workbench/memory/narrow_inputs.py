"""What linear layers keep of their inputs where products are in a narrow format: the inputs as cast."""

from collections.abc import Iterator
from dataclasses import replace

from workbench.cost.products import BFLOAT16_BYTES, NARROW, ProductFormat, is_narrowed
from workbench.model.layer import Attention, Layer, Matmul, Operator


def keeps_cast(layer: Layer, operator: Operator, products: ProductFormat) -> bool:
    """Whether an operator is a product that keeps its input as cast, not as it was.

    A scale a row keeps it as it was, for the cast that the weights' gradient needs (torchao,
    `float8_linear.py`). So do adapters, whose products are not in the narrow format.
    """
    if products is ProductFormat.SAME or NARROW[products].keeps_wide or layer.has_adapters:
        return False
    return is_narrowed(layer, operator)


def with_kept_inputs(layer: Layer, products: ProductFormat, *, beside_attention: bool) -> Layer:
    """Return the layer with input widths of products by what they keep, in elements before the cast.

    Linear layers of blocks keep their input for the weights' gradient as it is multiplied: cast to the
    narrow format (Transformer Engine, `_Linear`). After an attention, which keeps its output itself, that is
    a second tensor.

    Args:
        beside_attention: whether the account counts an attention's output as kept by the product behind it.
    """
    if not any(keeps_cast(layer, each, products) for each in layer.operators):
        return layer
    return replace(layer, operators=tuple(_kept(layer, products, beside_attention=beside_attention)))


def _kept(layer: Layer, products: ProductFormat, *, beside_attention: bool) -> Iterator[Operator]:
    previous: Operator | None = None
    for each in layer.operators:
        if isinstance(each, Matmul) and keeps_cast(layer, each, products):
            share = NARROW[products].element_bytes / BFLOAT16_BYTES
            share += beside_attention and isinstance(previous, Attention)
            yield replace(each, in_features=max(1, round(each.in_features * share)))
        else:
            yield each
        previous = each
