"""Cuts a chain of modules into blocks of even cost, where one block may hold layers of two modules."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from workbench.balance.stages.partition import partition


class Piece(NamedTuple):
    """A run of layers of one module on one block of ranks."""

    module: int
    block: int
    layers: tuple[int, int]


def chain_cuts(costs_s: Sequence[Sequence[float]], num_blocks: int) -> tuple[Piece, ...]:
    """Cut all modules into stages on that many blocks, the heaviest block as light as possible.

    Ours: whole ranks per module make one side wait if their work has no ratio of whole numbers; Entrain
    (dissertation, section 4.4.2) rounds. One shared block takes the rest of one module and the beginning
    of the next.

    Args:
        costs_s: by module along the chain, seconds of each of its layers over a batch.
        num_blocks: of ranks, at most as many as there are layers.

    Returns:
        Stages along the chain. Blocks ascend; a block has a piece of each module that it holds.

    Raises:
        ValueError: as `partition`.

    Complexity: that of `partition` over all layers.
    """
    flat = [cost for costs in costs_s for cost in costs]
    bounds = list(pairwise(accumulate(map(len, costs_s), initial=0)))
    pieces = []
    for block, (first, last) in enumerate(partition(flat, num_blocks)):
        for module, (start, end) in enumerate(bounds):
            low, high = max(first, start), min(last, end)
            if low < high:
                pieces.append(Piece(module, block, (low - start, high - start)))
    return tuple(pieces)
