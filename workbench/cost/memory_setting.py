"""What a layer's tensors depend on besides the layer: work, grid, element size."""

from typing import NamedTuple

from workbench.cost.roofline import Grid, Work, operator_tokens
from workbench.graph.layer import Operator

FLOAT32_BYTES = 4


class Setting(NamedTuple):
    """What a layer's tensors depend on besides the layer.

    Args:
        element_bytes: of weights and activations.
        is_gathered: items differ in length, so attention picks those of one length by index
            and puts the results back, which copies its output.
        looked_up: tokens on one rank that a layer of embeddings reads from its table, the others
            being features of another module; None: all.
    """

    work: Work
    grid: Grid
    element_bytes: int
    is_gathered: bool
    looked_up: float | None = None

    @property
    def wide_bytes(self) -> int:
        """Norms, softmax and loss compute in float32 or wider."""
        return max(FLOAT32_BYTES, self.element_bytes)

    def tokens(self, operator: Operator) -> float:
        return operator_tokens(operator, self.work, self.grid)
