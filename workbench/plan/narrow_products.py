"""Formats of a module's products and of their weights' gradients: the machine that computes layers so."""

from workbench.cost.model import CostModel
from workbench.cost.products import ProductFormat, narrow_rate
from workbench.plan.plan import Settings
from workbench.units import FLOAT32_BYTES


def multiplying(cost: CostModel, settings: Settings, module: str) -> CostModel:
    """Return the cost model of one device for a module's layers, in its formats of products and gradients.

    Raises:
        ValueError: the device has no products in the module's format.
    """
    cost = with_gradients(cost, settings)
    products = settings.of(module).products
    if products is ProductFormat.SAME:
        return cost
    try:
        narrow_rate(cost.profile, products)
    except ValueError as error:
        raise ValueError(f"module {module!r}: {error}") from None
    return cost.multiplying_in(products)


def with_gradients(cost: CostModel, settings: Settings) -> CostModel:
    """Return the cost model whose products write gradients as a plan keeps them; `cost` where they are wide.

    Megatron's kernels keep them in float32 whatever their sums over ranks.
    """
    is_wide = settings.gradient_bytes >= FLOAT32_BYTES or settings.kernels.is_megatron
    return cost if is_wide else cost.writing_gradients()
