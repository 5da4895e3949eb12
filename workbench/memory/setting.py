"""What a layer's tensors depend on besides the layer: work, grid, element size."""

from typing import NamedTuple

from workbench.cost.products import ProductFormat
from workbench.cost.roofline import Grid, Work, operator_tokens
from workbench.model.block_modules import BlockModule
from workbench.model.latent_attention import LATENT_NORMS
from workbench.model.layer import Operator, Pointwise, Shard
from workbench.plan.plan import KeyExchange
from workbench.units import FLOAT32_BYTES

INDEX_BYTES = 8


class Setting(NamedTuple):
    """What a layer's tensors depend on besides the layer.

    Args:
        element_bytes: of weights and activations.
        is_gathered: items differ in length, so attention picks those of one length by index
            and puts the results back, which copies its output.
        looked_up: tokens on one rank that a layer of embeddings reads from its table, the others
            being features of another module; None: all.
        divides_tokens: tensor-parallel ranks split tokens where the layer is not cut.
        lengths: tokens of every item inside the blocks, ascending.
        computed_again: modules of a block that its backward computes again.
        products: format of the products of blocks.
        masked_tokens: of a microbatch whose attention reads one mask over all its items; 0: item by item.
        key_exchange: how context-parallel ranks bring queries and keys together.
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
    products: ProductFormat = ProductFormat.SAME
    key_exchange: KeyExchange = KeyExchange.ALL_GATHER

    @property
    def copies_attention(self) -> bool:
        """Whether an attention's output is copied: into its items' order, or to set masked tokens to 0."""
        return self.is_gathered or self.masked_tokens > 0

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element of norms, softmax and loss, which compute in float32 or wider."""
        return max(FLOAT32_BYTES, self.element_bytes)

    def tokens(self, operator: Operator) -> float:
        return operator_tokens(operator, self.work, self.grid)

    def cut(self, operator: Pointwise) -> int:
        """Return how many ranks split what a memory-bound operator reads and writes."""
        divides = self.divides_tokens and operator.name not in LATENT_NORMS  # these are inside an attention
        is_replicated = operator.shard is Shard.REPLICATED and not divides
        return 1 if is_replicated else self.grid.tp
