"""Some weights of a stage laid end to end: whole while the stage is used, else this rank's part alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.step.weight_bucket import places
from runtime.world.tensor_collectives import GATHER, SCATTER

# Shape suffixes: N = elements of all weights and padding, S = elements of one part.


@dataclass(slots=True)
class Travelling:
    """An exchange under way; its tensors live as long as it does.

    Args:
        work: to wait for.
        flat: [N] what is reduce-scattered, or all-gathered.
        part: [S] this rank's part of the sum.
        given: [S] what is sent to the others.
    """

    work: dist.Work
    flat: Tensor | None = None
    part: Tensor | None = None
    given: Tensor | None = None


class ShardedWeights:
    """Weights that become views of one flat tensor, whose memory comes and goes.

    `part` is what this rank keeps, `own` what its optimizer updates: the same memory unless that is wide.
    Storage is emptied and filled again in place, so that what autograd keeps for the backward is whole
    again when the backward needs it.

    Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 (flat parameters).
    Differs: as that of its first version; parts are of the flat tensor, not of each weight.

    Args:
        held: the weights, all trainable or all frozen.
        ranks: among which they are sharded, this one included.
        rank: this one.
        group: the process group of the ranks; None: the world.
        wide: what the optimizer works in; None: the weights' own type.
        like: the same weights, tied, in another stage of this rank: part and gradient are theirs.
        resized: told how many bytes come (or go, below 0).
    """

    def __init__(
        self,
        held: Sequence[nn.Parameter],
        ranks: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        wide: torch.dtype | None = None,
        like: "ShardedWeights | None" = None,
        resized: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._held, self._num_parts, self._group = held, len(ranks), group
        self._resized = resized
        first = held[0]
        self._size = -(-sum(weight.numel() for weight in held) // len(ranks))
        self._whole_N = first.new_zeros(self._size * len(ranks), requires_grad=False)
        for place_N, weight in zip(places(self._whole_N, held), held, strict=True):
            place_N.copy_(weight.detach().reshape(-1))
            weight.data = place_N.view_as(weight)
        if like is None:
            start = ranks.index(rank) * self._size
            self.part = self._whole_N.narrow(0, start, self._size).clone()
            self.own = nn.Parameter(self.part.to(wide or first.dtype), requires_grad=first.requires_grad)
        else:
            self.part, self.own = like.part, like.own
        self._num_bytes = self._whole_N.untyped_storage().nbytes()
        self._whole_N.untyped_storage().resize_(0)

    @property
    def is_trained(self) -> bool:
        return self.own.requires_grad

    @property
    def is_updated_in_place(self) -> bool:
        """Whether the optimizer updates the very part that is gathered."""
        return self.is_trained and self.part.dtype == self.own.dtype

    def gather(self) -> Travelling:
        """Start making the weights whole."""
        self._whole_N.untyped_storage().resize_(self._num_bytes)
        self._resized(self._num_bytes)
        given_S = self.part.clone()
        work = GATHER(self._whole_N, given_S, group=self._group, async_op=True)
        return Travelling(work, given=given_S)

    def let_go(self) -> None:
        """Keep this rank's part alone."""
        self._whole_N.untyped_storage().resize_(0)
        self._resized(-self._num_bytes)

    def reduce_scatter(self) -> Travelling:
        """Start summing gradients over the ranks, each for its part; zeros where a backward made none."""
        flat_N = self.part.new_zeros(self._size * self._num_parts, dtype=self.own.dtype)
        for place_N, weight in zip(places(flat_N, self._held), self._held, strict=True):
            if weight.grad is not None:
                place_N.view_as(weight).copy_(weight.grad)
                weight.grad = None
        part_S = torch.empty_like(self.own, requires_grad=False)
        work = SCATTER(part_S, flat_N, group=self._group, async_op=True)
        return Travelling(work, flat_N, part_S)

    def add(self, part_S: Tensor) -> None:
        """Add a part of a gradient to those of earlier rounds."""
        self.own.grad = part_S if self.own.grad is None else self.own.grad.add_(part_S)

    def gradient(self) -> Tensor:
        """[S] this rank's part of the gradient; zeros where none was made."""
        if self.own.grad is None:
            self.own.grad = torch.zeros_like(self.own)
        return self.own.grad

    def publish(self) -> None:
        """After the optimizer's step: what is gathered follows what it updated."""
        if not self.is_updated_in_place:
            self.part.copy_(self.own.detach())

    def start_whole_gradient(self) -> Travelling:
        """Start collecting the gradient of all parts."""
        assert self.own.grad is not None, "gradients are reduce-scattered first"
        flat_N = self.own.new_empty(self._size * self._num_parts, requires_grad=False)
        given_S = self.own.grad
        work = GATHER(flat_N, given_S, group=self._group, async_op=True)
        return Travelling(work, flat_N, given=given_S)

    def pieces(self, flat_N: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(Weight, what stands at its place)."""
        for place_N, weight in zip(places(flat_N, self._held), self._held, strict=True):
            yield weight, place_N.view_as(weight)
