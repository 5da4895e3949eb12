"""The work of an indexer, which has a forward alone: FLOP, bytes and kernels."""

from workbench.model.indexer import Indexer
from workbench.units import FLOAT32_BYTES

KERNELS = 6  # three products, a norm and rotation, scores, the choice
INDEX_BYTES = 4  # of a chosen key


def indexer_flop(indexer: Indexer, tokens: float, pairs: float) -> float:
    """FLOP of its projections, and of the scores of all pairs that the mask leaves, chosen or not.

    A pair has a product of the head's width for each head, and one of that head's result with its weight.

    Args:
        indexer: its sizes.
        tokens: queries, each of which is a key, too.
        pairs: query-key pairs of the mask.
    """
    projections = sum(2 * entering * leaving for _, entering, leaving in indexer.products)
    return tokens * projections + pairs * 2 * indexer.num_heads * (indexer.head_dim + 1)


def scores_bytes(indexer: Indexer, tokens: float, pairs: float, element_bytes: int, top_k: int) -> float:
    """Bytes that its scores and its choice move: queries, key and weights once; scores twice; chosen indices.

    A score of a pair, summed over heads, is a float32 that one kernel writes and another reads.
    """
    read = indexer.num_heads * (indexer.head_dim + 1) + indexer.head_dim
    return tokens * (read * element_bytes + top_k * INDEX_BYTES) + 2 * pairs * FLOAT32_BYTES
