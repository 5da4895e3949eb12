"""Products in a narrow format: the machine that computes a module's layers so."""

from workbench.cost.model import CostModel
from workbench.cost.products import ProductFormat, narrow_rate
from workbench.plan.plan import Settings


def multiplying(cost: CostModel, settings: Settings, module: str) -> CostModel:
    """Return the cost model of one device for a module's layers; `cost` itself where no format is set.

    Raises:
        ValueError: the device has no products in the module's format.
    """
    products = settings.of(module).products
    if products is ProductFormat.SAME:
        return cost
    try:
        narrow_rate(cost.profile, products)
    except ValueError as error:
        raise ValueError(f"module {module!r}: {error}") from None
    return cost.multiplying_in(products)
