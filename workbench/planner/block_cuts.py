"""Cuts of a chain of layers whose stages share blocks of ranks: balances the sum on each block."""

from collections.abc import Callable, Iterator, Sequence

from workbench.float_sum import float_sum

Cuts = tuple[tuple[int, int], ...]


def even_blocks(cost_s: Sequence[float], cuts: Cuts, block_of: Callable[[int], int]) -> Cuts:
    """Move stage boundaries layer by layer until no move makes the blocks more even.

    Steepest descent on (slowest block, sum of squares of all blocks), from a balanced partition into single
    stages. The result is a local optimum: where head and embedding share a block, the other layers even
    it out.

    Args:
        cost_s: seconds of each layer.
        cuts: layers [first, last) of each stage, no stage empty.
        block_of: index of a stage in the chain -> its block of ranks.

    Complexity: O(stages^2) per move; every move lowers the objective, so it ends.
    """
    best = cuts, _objective(cost_s, cuts, block_of)
    while True:
        moves = ((moved, _objective(cost_s, moved, block_of)) for moved in _moves(best[0]))
        best_move = min(moves, key=lambda move: move[1], default=best)
        if best_move[1] >= best[1]:
            return best[0]
        best = best_move


def _objective(cost_s: Sequence[float], cuts: Cuts, block_of: Callable[[int], int]) -> tuple[float, float]:
    load_of: dict[int, float] = {}
    for index, (first, last) in enumerate(cuts):
        load_of[block_of(index)] = load_of.get(block_of(index), 0.0) + float_sum(cost_s[first:last])
    return max(load_of.values()), float_sum(load * load for load in load_of.values())


def _moves(cuts: Cuts) -> Iterator[Cuts]:
    """All cuts with one boundary moved by one layer, none of whose stages is empty."""
    for index in range(len(cuts) - 1):
        (first, boundary), (_, last) = cuts[index : index + 2]
        for moved in (boundary - 1, boundary + 1):
            if first < moved < last:
                yield (*cuts[:index], (first, moved), (moved, last), *cuts[index + 2 :])
