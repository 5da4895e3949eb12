"""Temporaries of a rank while it updates matrices by Muon."""

from collections.abc import Iterable

from workbench.model.muon import newton_schulz_bytes
from workbench.plan.matrix_pools import MatrixPool, matrices_in, matrix_owners, pools_by_rank
from workbench.plan.muon import ortho_precision
from workbench.plan.plan import Plan


def muon_working(plan: Plan, rank: int) -> int:
    """Return the most bytes of temporaries of a rank, over its pools, which take turns.

    Of matrices in parts, a rank has its parts of all updates, and those of the matrices that it owns: the
    bytes are those of the rank with most. While it orthogonalises one, that is there whole besides.

    Complexity: O(matrices of the rank).
    """
    return max((_pool_bytes(plan, pool) for pool in pools_by_rank(plan).get(rank, ())), default=0)


def _pool_bytes(plan: Plan, pool: MatrixPool) -> int:
    element_bytes, ortho_bytes = plan.settings.gradient_bytes, ortho_precision(plan.settings).num_bytes
    shapes = [matrix.shape for weights in pool.weights for matrix in matrices_in(plan, weights)]
    if len(pool.ranks) == 1:
        return max(newton_schulz_bytes(shape, element_bytes, ortho_bytes) for shape in shapes)
    owned = _most_owned(shapes, len(pool.ranks))
    in_parts = -(-sum(rows * columns for rows, columns in shapes) // len(pool.ranks))
    largest = max(newton_schulz_bytes(shape, ortho_bytes, ortho_bytes) for shape in shapes)
    return (in_parts + owned) * ortho_bytes + largest


def _most_owned(shapes: Iterable[tuple[int, ...]], num_ranks: int) -> int:
    """Return the elements of the matrices of the rank that owns most."""
    owned, listed = [0] * num_ranks, list(shapes)
    for (rows, columns), owner in zip(listed, matrix_owners(listed, num_ranks), strict=True):
        owned[owner] += rows * columns
    return max(owned)
