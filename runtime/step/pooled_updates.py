"""Updates of matrices in parts on the same ranks: the owner of each orthogonalises it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from runtime.step.flat_part import CutWeight, Span
from runtime.step.muon_matrices import Matrix
from runtime.step.newton_schulz import ortho_dtype
from workbench.plan.matrix_pools import matrix_owners

Counts = tuple[list[int], list[int]]  # elements from and to every rank
Exchange = Callable[[Tensor, Tensor, Counts, tuple[int, ...]], None]  # received, sent, counts, ranks


@dataclass(frozen=True, slots=True, eq=False)
class PooledMatrix:
    """A matrix, and its elements in the parts of a pool's ranks."""

    matrix: Matrix
    cut: CutWeight

    @property
    def spans(self) -> tuple[Span, ...]:
        """Its elements in the part of every rank."""
        return self.cut.spans

    @property
    def piece(self) -> nn.Parameter | None:
        """Those of this rank."""
        return self.cut.piece


class PooledUpdates:
    """Matrices whose elements some ranks hold in parts.

    Parts of updates go to the owners in one all-to-all, and come back orthogonalised in another: of what is
    sent, a rank has only its parts and the matrices that it owns.

    Source: Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.3 (distributed). Differs: each
    matrix is gathered by one rank, not by all that hold parts of it.

    Args:
        matrices: in the same order on all ranks.
        ranks: that hold the parts, this one among them.
        member: index of this rank.
        like: of the device and the optimizer's type.
        exchange: an all-to-all among ranks, waited for.
    """

    def __init__(
        self,
        matrices: Sequence[PooledMatrix],
        ranks: tuple[int, ...],
        member: int,
        *,
        like: Tensor,
        exchange: Exchange,
    ) -> None:
        owners = matrix_owners([each.matrix.shape for each in matrices], len(ranks))
        self._by_owner = [
            [each for each, owner in zip(matrices, owners, strict=True) if owner == index]
            for index in range(len(ranks))
        ]
        self._ranks, self._like, self._exchange = ranks, like, exchange
        self._owned = self._by_owner[member]
        to_owners = [_elements(owned, member) for owned in self._by_owner]
        from_ranks = [_elements(self._owned, index) for index in range(len(ranks))]
        self._counts = from_ranks, to_owners

    def orthogonalised(
        self, update_of: Callable[[nn.Parameter], Tensor]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (this rank's piece of a matrix, its part of the orthogonalised update).

        Args:
            update_of: a piece's part of the update, called once for each.

        Raises:
            RankError: an exchange did not end in time, or a peer is gone; as `Matrix.orthogonalised`.
        """
        pieces = [each.piece for each in chain(*self._by_owner) if each.piece is not None]
        from_ranks, to_owners = self._counts
        dtype, device = ortho_dtype(self._like.dtype), self._like.device
        parts = torch.empty(sum(to_owners), dtype=dtype, device=device)
        updates = list(zip(pieces, parts.split([piece.numel() for piece in pieces]), strict=True))
        for mine, values in updates:
            values.copy_(update_of(mine).reshape(-1))
        owned = parts.new_empty(sum(from_ranks))
        self._exchange(owned, parts, (from_ranks, to_owners), self._ranks)
        for pooled, pieces_of in zip(self._owned, self._pieces_in(owned), strict=True):
            update = torch.cat(pieces_of).view_as(pooled.matrix.weight)
            result = pooled.matrix.orthogonalised(update).reshape(-1)
            for piece, (first, last) in zip(pieces_of, pooled.spans, strict=True):
                piece.copy_(result[first:last])
        self._exchange(parts, owned, (to_owners, from_ranks), self._ranks)
        yield from ((mine, values.view_as(mine)) for mine, values in updates)

    def _pieces_in(self, owned: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield, for each owned matrix, its pieces in what came from the ranks."""
        by_rank = [
            part.split([last - first for first, last in (each.spans[index] for each in self._owned)])
            for index, part in enumerate(owned.split(self._counts[0]))
        ]
        yield from zip(*by_rank, strict=True)


def _elements(matrices: Sequence[PooledMatrix], member: int) -> int:
    return sum(last - first for first, last in (each.spans[member] for each in matrices))
