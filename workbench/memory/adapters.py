"""What low-rank adapters add to a layer's tensors: the narrow one between their two products."""

from workbench.memory.setting import Setting
from workbench.model.layer import Operator
from workbench.model.trained import adapter_of


def inner_width(operator: Operator) -> int:
    """Width of what an operator's adapter keeps for the gradient of B: x A^T, whole on each rank; 0: none."""
    return sum(product.out_features for product in adapter_of(operator)[:1])


def inner_bytes(operator: Operator, setting: Setting) -> float:
    """Bytes of that tensor on one rank."""
    width = inner_width(operator)
    return setting.tokens(operator) * width * setting.element_bytes if width else 0.0
