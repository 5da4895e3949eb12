"""Temporaries of a rank while it updates matrices by Muon."""

from collections.abc import Sequence
from math import ceil

from workbench.float_sum import float_sum
from workbench.model.muon import newton_schulz_bytes
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import Weights
from workbench.plan.matrix_pools import HeldMatrix, matrices_in, matrix_owners, pools_by_rank
from workbench.plan.muon import ortho_precision
from workbench.plan.plan import Plan


def muon_working(plan: Plan, rank: int) -> int:
    """Return the most bytes of temporaries of a rank, over its pools, which take turns.

    Of matrices in parts, a rank has its parts of all updates, and those of the matrices that it owns: the
    bytes are those of the rank with most. While it orthogonalises one, that is there whole besides.

    Complexity: O(matrices of the rank), once for equal pools of a plan.
    """
    pools = pools_by_rank(plan).get(rank, ())
    return max((_pool_bytes(plan, pool.weights, len(pool.ranks)) for pool in pools), default=0)


@cached_on_instance
def _pool_bytes(plan: Plan, pooled: tuple[Weights, ...], num_ranks: int) -> int:
    element_bytes, ortho_bytes = plan.settings.gradient_bytes, ortho_precision(plan.settings).num_bytes
    matrices = [matrix for weights in pooled for matrix in matrices_in(plan, weights)]
    if num_ranks == 1:
        return max(_turn_bytes(matrix, element_bytes, ortho_bytes) for matrix in matrices)
    matrices = [each for matrix in matrices for each in matrix.each()]
    owned = ceil(_most_owned(matrices, num_ranks))
    in_parts = ceil(float_sum(matrix.held_elements for matrix in matrices) / num_ranks)
    largest = max(_turn_bytes(matrix, ortho_bytes, ortho_bytes) for matrix in matrices)
    return (in_parts + owned) * ortho_bytes + largest


def _turn_bytes(matrix: HeldMatrix, element_bytes: int, ortho_bytes: int) -> int:
    """Return the temporaries while a matrix is orthogonalised on a rank that has its part of the update.

    Those of experts of a rank are orthogonalised together.

    Where tensor-parallel ranks cut it: the part, its copies in the type of the products and to be sent, the
    parts of all, and these joined in two steps; the joined matrix takes the place of the update.
    """
    if matrix.tp == 1:
        return matrix.num_stacked * newton_schulz_bytes(matrix.shape, element_bytes, ortho_bytes)
    held = ceil(matrix.held_elements)
    gathering = 3 * matrix.num_elements * ortho_bytes
    turning = matrix.num_stacked * newton_schulz_bytes(matrix.shape, ortho_bytes, ortho_bytes)
    return held * (element_bytes + 2 * ortho_bytes) + max(gathering, turning)


def _most_owned(matrices: Sequence[HeldMatrix], num_ranks: int) -> float:
    """Return the elements of parts of the matrices of the rank that owns most."""
    owned = [0.0] * num_ranks
    owners = matrix_owners([matrix.shape for matrix in matrices], num_ranks)
    for matrix, owner in zip(matrices, owners, strict=True):
        owned[owner] += matrix.held_elements
    return max(owned)
