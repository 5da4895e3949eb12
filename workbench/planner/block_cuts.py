"""Cuts of a chain whose stages share blocks of ranks: what counts is the sum on a block."""

from collections.abc import Callable, Iterator, Sequence

Cuts = tuple[tuple[int, int], ...]


def even_blocks(cost_s: Sequence[float], cuts: Cuts, block_of: Callable[[int], int]) -> Cuts:
    """The cuts with boundaries moved layer by layer until no move makes the blocks more even.

    Steepest descent on (slowest block, sum of squares of all blocks); a balanced partition into single
    stages is the start. A local optimum: a head on the same block as the embedding is made up for
    by the layers beside them.

    Args:
        cost_s: seconds of each layer.
        cuts: layers [first, last) of each stage, no stage empty.
        block_of: place of a stage in the chain -> its block of ranks.

    Complexity: O(stages^2) per move; every move lowers the objective, so it ends.
    """
    best = cuts, _objective(cost_s, cuts, block_of)
    while True:
        moves = ((moved, _objective(cost_s, moved, block_of)) for moved in _moves(best[0]))
        found = min(moves, key=lambda move: move[1], default=best)
        if found[1] >= best[1]:
            return best[0]
        best = found


def _objective(cost_s: Sequence[float], cuts: Cuts, block_of: Callable[[int], int]) -> tuple[float, float]:
    loads: dict[int, float] = {}
    for index, (first, last) in enumerate(cuts):
        loads[block_of(index)] = loads.get(block_of(index), 0.0) + sum(cost_s[first:last])
    return max(loads.values()), sum(load * load for load in loads.values())


def _moves(cuts: Cuts) -> Iterator[Cuts]:
    """Every boundary one layer to either side, leaving no stage empty."""
    for index in range(len(cuts) - 1):
        (first, boundary), (_, last) = cuts[index : index + 2]
        for moved in (boundary - 1, boundary + 1):
            if first < moved < last:
                yield (*cuts[:index], (first, moved), (moved, last), *cuts[index + 2 :])
