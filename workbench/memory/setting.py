"""What a layer's tensors depend on besides the layer: work, grid, element size."""

from typing import NamedTuple

from workbench.cost.roofline import Grid, Work, operator_tokens
from workbench.model.block_modules import BlockModule
from workbench.model.layer import Operator, Pointwise, Shard

FLOAT32_BYTES = 4


class Setting(NamedTuple):
    """What a layer's tensors depend on besides the layer.

    Args:
        element_bytes: of weights and activations.
        is_gathered: items differ in length, so attention picks those of one length by index
            and puts the results back, which copies its output.
        looked_up: tokens on one rank that a layer of embeddings reads from its table, the others
            being features of another module; None: all.
        divides_tokens: tensor-parallel ranks split tokens where the layer is not cut.
        lengths: tokens inside the blocks of every item, ascending.
        computed_again: modules of a block that its backward computes again.
        masked_tokens: of a microbatch whose attention reads one mask over all its items; 0: item by item.
    """

    work: Work
    grid: Grid
    element_bytes: int
    is_gathered: bool
    looked_up: float | None = None
    divides_tokens: bool = False
    lengths: tuple[int, ...] = ()
    computed_again: tuple[BlockModule, ...] = ()
    masked_tokens: int = 0

    @property
    def copies_attention(self) -> bool:
        """Whether an attention's output is written once more: back to its items' places, or where it is 0."""
        return self.is_gathered or self.masked_tokens > 0

    @property
    def wide_bytes(self) -> int:
        """Norms, softmax and loss compute in float32 or wider."""
        return max(FLOAT32_BYTES, self.element_bytes)

    def tokens(self, operator: Operator) -> float:
        return operator_tokens(operator, self.work, self.grid)

    def cut(self, operator: Pointwise) -> int:
        """Ranks that share what a memory-bound operator reads and writes."""
        is_whole = operator.shard is Shard.REPLICATED and not self.divides_tokens
        return 1 if is_whole else self.grid.tp
