"""Seconds of an indexer, from rates of products and bytes of memory; none were measured."""

from workbench.cost.indexer import scores_bytes
from workbench.cost.kernel_times import ELEMENT_BYTES, KernelTimes
from workbench.cost.profile import Direction
from workbench.cost.roofline import Gemm, Grid, Work, index_flop, operator_tokens
from workbench.float_sum import float_sum
from workbench.model.layer import Attention


def indexer_s(cost: KernelTimes, attention: Attention, work: Work, grid: Grid, precision: str) -> float:
    """Seconds of the forward of an attention's indexer on one rank; 0 without one.

    Its projections are products as any others. Scores of all pairs take the time of their FLOP, at the rate
    of products of its heads with the mean number of keys, or of their bytes.
    """
    indexer, tokens = attention.indexer, operator_tokens(attention, work, grid)
    if indexer is None or not tokens:
        return 0.0
    pairs = work.attention_area / grid.cp
    projections = [Gemm(tokens, leaving, entering) for _, entering, leaving in indexer.products]
    projected_s = float_sum(cost.product_s(gemm, Direction.FORWARD, precision)[0] for gemm in projections)
    flop = index_flop(attention, work, grid) - float_sum(gemm.flop for gemm in projections)
    moved = scores_bytes(indexer, tokens, pairs, ELEMENT_BYTES[precision], attention.top_k or 0)
    scores = Gemm(tokens * indexer.num_heads, max(1.0, pairs / tokens), indexer.head_dim)
    return projected_s + cost.chunks_s(flop, moved, scores, precision)
