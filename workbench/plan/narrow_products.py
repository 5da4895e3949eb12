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
    own = settings.of(module)
    if own.shards_parameters and not own.is_gathered_once:
        cost = writing_gradients(cost, settings)
    products = own.products
    if products is ProductFormat.SAME:
        return cost
    try:
        narrow_rate(cost.profile, products)
    except ValueError as error:
        raise ValueError(f"module {module!r}: {error}") from None
    return cost.multiplying_in(products)


def writing_gradients(cost: CostModel, settings: Settings) -> CostModel:
    """Return the cost model whose products write two-byte gradients, to which nothing is added.

    So are those that are reduced after every microbatch. Autograd adds others to what earlier microbatches
    left: two gradients of two bytes read and one written are as many bytes as a product moves that adds into
    float32. `cost` where gradients are wide: Megatron's kernels keep them so whatever their sums over ranks.

    Differs: the first microbatch of a step adds nothing, and is priced as the others.
    """
    is_wide = settings.gradient_bytes >= FLOAT32_BYTES or settings.kernels.is_megatron
    return cost if is_wide else cost.writing_gradients()
