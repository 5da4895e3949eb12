"""Weights of a stage as one flat tensor: whole while the stage is used, else only this rank's part."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.parallel.tensor.group import SharedWeights
from runtime.step.flat_part import FlatPart
from runtime.world.tensor_collectives import GATHER, SCATTER, SUM, free, tells_scattered

# Shape suffixes: N = elements of all weights and padding, S = elements of one part.


@dataclass(slots=True)
class InFlight:
    """An exchange in flight, and its tensors.

    Args:
        work: to wait for.
        flat: [N] input of a reduce-scatter, or output of an all-gather.
        part: [S] this rank's part of the sum.
        given: [S] what is sent to the other ranks.
        summed: [S] this rank's part of `flat`, to be copied to `part` once the work has ended.
    """

    work: dist.Work
    flat: Tensor | None = None
    part: Tensor | None = None
    given: Tensor | None = None
    summed: Tensor | None = None

    def received(self) -> Tensor | None:
        """[S] this rank's part of the sum, after the work has ended; None: of an all-gather."""
        if self.part is not None and self.summed is not None:
            self.part.copy_(self.summed)
        return self.part

    def free_inputs(self) -> None:
        """Free what an ended exchange sent; a gathered tensor stays."""
        for tensor in (self.given, self.flat if self.part is not None else None):
            if tensor is not None:
                free(tensor)


def split_flat(flat_N: Tensor, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the elements of each tensor in a flat one in which they are concatenated."""
    start = 0
    for tensor in tensors:
        yield flat_N.narrow(0, start, tensor.numel())
        start += tensor.numel()


class ShardedWeights:
    """Weights as views of one flat tensor, whose memory is allocated only while it is gathered.

    `part` is this rank's permanent part, `own` is updated by its optimizer: the same memory unless `own` is
    wider. Storage is freed and refilled in place, so that tensors which autograd keeps for the backward are
    valid again when the backward needs them.

    Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 (flat parameters).
    Differs: as in its first version, parts are of the flat tensor, not of each weight.

    Where this rank shares them with no other, they stay whole: there is nothing to gather, and their gradient
    is only added up.

    Args:
        weights: all trainable or all frozen.
        ranks: among which they are sharded, including this one.
        rank: this one.
        group: the process group of the ranks; None: the world.
        wide: type of the optimizer's copy; None: the weights' own type.
        like: the same weights, tied, in another stage of this rank: part and gradient are shared with them.
        resized: called with the change of allocated bytes.
        shared: how tensor-parallel ranks share the weights; None: this one has whole ones.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        ranks: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        wide: torch.dtype | None = None,
        like: "ShardedWeights | None" = None,
        resized: Callable[[int], None] = lambda num_bytes: None,
        shared: SharedWeights | None = None,
    ) -> None:
        self._held, self._num_parts, self._group, self.ranks = weights, len(ranks), group, ranks
        self._resized, self._shared, self._index = resized, shared, ranks.index(rank)
        first = weights[0]
        self._size = -(-sum(weight.numel() for weight in weights) // len(ranks))
        self._whole_N = first.new_zeros(self._size * len(ranks), requires_grad=False)
        for part_N, weight in zip(split_flat(self._whole_N, weights), weights, strict=True):
            part_N.copy_(weight.detach().reshape(-1))
            weight.data = part_N.view_as(weight)
        if like is None:
            part_S = self._whole_N.narrow(0, self._index * self._size, self._size)
            self.part = part_S.clone() if self.is_sharded else part_S
            self.own = nn.Parameter(self.part.to(wide or first.dtype), requires_grad=first.requires_grad)
        else:
            self.part, self.own = like.part, like.own
        self._num_bytes = self._whole_N.untyped_storage().nbytes()
        self._sum_N: Tensor | None = None
        if self.is_sharded:
            self._whole_N.untyped_storage().resize_(0)

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold parts of them."""
        return self._num_parts > 1

    @property
    def is_trained(self) -> bool:
        return self.own.requires_grad

    @property
    def is_updated_in_place(self) -> bool:
        """Whether the optimizer updates the part that is gathered directly."""
        return self.is_trained and self.part.dtype == self.own.dtype

    def flat_part(self) -> FlatPart:
        """The part that this rank updates."""
        return FlatPart(own=self.own, held=tuple(self._held), ranks=self.ranks, member=self._index)

    def gather(self) -> InFlight:
        """Start gathering the weights."""
        self._whole_N.untyped_storage().resize_(self._num_bytes)
        self._resized(self._num_bytes)
        given_S = self.part.clone()
        work = GATHER(self._whole_N, given_S, group=self._group, async_op=True)
        return InFlight(work, given=given_S)

    def release(self) -> None:
        """Free all but this rank's part."""
        self._whole_N.untyped_storage().resize_(0)
        self._resized(-self._num_bytes)

    def accumulate(self) -> None:
        """Move the weights' gradients, if there are any, to a flat sum in the optimizer's type."""
        if all(weight.grad is None for weight in self._held):
            return
        if self.is_sharded:
            self._sum_N = self._summed()
        else:
            self.keep_gradient()

    def _summed(self) -> Tensor:
        """[N] the sum of all gradients since the last reduce-scatter; missing ones count as zeros."""
        sum_N = self._sum_N
        if sum_N is None:
            sum_N = self.part.new_zeros(self._size * self._num_parts, dtype=self.own.dtype)
        self._take_gradients(sum_N)
        return sum_N

    def reduce_scatter(self) -> InFlight:
        """Start the reduce-scatter of gradients; missing ones count as zeros.

        Partial ones are summed first over tensor-parallel ranks, all of which call this. On the host it is an
        all-reduce of which each rank keeps its part, as gloo's own is, which does not report its end.
        """
        flat_N, self._sum_N = self._summed(), None
        if self._shared is not None:
            partial = {id(weight) for weight in self._shared.partial}
            pieces = [piece for weight, piece in self.pieces(flat_N) if id(weight) in partial]
            if pieces:
                total = torch.cat([piece.reshape(-1) for piece in pieces])
                self._shared.group.sum(total)
                for piece, summed in zip(pieces, split_flat(total, pieces), strict=True):
                    piece.copy_(summed.view_as(piece))
        part_S = torch.empty_like(self.own, requires_grad=False)
        if tells_scattered(flat_N):
            work = SCATTER(part_S, flat_N, group=self._group, async_op=True)
            return InFlight(work, flat_N, part_S)
        summed_S = flat_N.narrow(0, self._index * self._size, self._size)
        work = SUM(flat_N, group=self._group, async_op=True)
        return InFlight(work, flat_N, part_S, summed=summed_S)

    def keep_gradient(self) -> None:
        """Add the gradients of a round to those of earlier rounds, where no other rank holds the weights."""
        self._take_gradients(self.gradient())

    def _take_gradients(self, flat_N: Tensor) -> None:
        """Move the weights' gradients into a sum."""
        for weight, total in self.pieces(flat_N):
            if weight.grad is not None:
                total.add_(weight.grad)
                weight.grad = None

    def counted(self) -> Iterator[Tensor]:
        """This rank's part of the gradient, without weights that another tensor-parallel rank counts."""
        elsewhere = set() if self._shared is None else {id(weight) for weight in self._shared.elsewhere}
        part_S = self.gradient()
        if not elsewhere.intersection(map(id, self._held)):
            yield part_S
            return
        first, start = self._index * self._size, 0
        for weight in self._held:
            stop = start + weight.numel()
            low, high = max(start, first), min(stop, first + self._size)
            if low < high and id(weight) not in elsewhere:
                yield part_S.narrow(0, low - first, high - low)
            start = stop

    def add(self, part_S: Tensor) -> None:
        """Keep a part of the gradient, or add it to that of earlier rounds and free it."""
        if self.own.grad is None:
            self.own.grad = part_S
        else:
            self.own.grad.add_(part_S)
            free(part_S)

    def gradient(self) -> Tensor:
        """[S] this rank's part of the gradient; zeros if there is none."""
        if self.own.grad is None:
            self.own.grad = torch.zeros_like(self.own)
        return self.own.grad

    def publish(self) -> None:
        """Copy the optimizer's update to the part that is gathered."""
        if not self.is_updated_in_place:
            self.part.copy_(self.own.detach())

    def start_whole_gradient(self) -> InFlight:
        """Start gathering the gradient of all parts."""
        assert self.own.grad is not None, "gradients are reduce-scattered first"
        flat_N = self.own.new_empty(self._size * self._num_parts, requires_grad=False)
        given_S = self.own.grad
        work = GATHER(flat_N, given_S, group=self._group, async_op=True)
        return InFlight(work, flat_N, given=given_S)

    def pieces(self, flat_N: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (weight, its elements in a flat tensor)."""
        for part_N, weight in zip(split_flat(flat_N, self._held), self._held, strict=True):
            yield weight, part_N.view_as(weight)
