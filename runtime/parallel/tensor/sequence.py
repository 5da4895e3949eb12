"""Sequence parallelism: tensor-parallel ranks split tokens for operators per token: norms, biases, sums.

Instead of all-reducing whole tensors, members gather tokens before partitioned computation, and
reduce-scatter them after it: the same number of bytes, and fewer activations.

Every member has the same number of tokens; where they do not divide, the last ones are padding. Padding is
zero, is read by nothing, and its gradient is zero.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2.2 (g and its conjugate). Differs: a product keeps the gathered tokens for its backward
instead of gathering them again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.adapter import Context
from runtime.parallel.context.group import Pending
from runtime.parallel.linear_map import mapped
from runtime.parallel.tensor.group import TensorGroup
from workbench.plan.sequence import TokenBorders

# Shape suffixes: T = tokens of all members, N = tokens of one, M = members, D = width.

Move = Callable[["TokenParts", Tensor], Tensor]


@dataclass(slots=True)
class TokenParts:
    """Splits and joins the tokens of the current layer among members.

    Args:
        group: the members; their tokens are in the order of the process group.
        num_tokens: of all of them; set before a layer runs, and again before it is recomputed.
    """

    group: TensorGroup
    num_tokens: int = 0

    @property
    def num_own(self) -> int:
        return -(-self.num_tokens // self.group.size)

    @property
    def position(self) -> int:
        return sorted(self.group.ranks).index(self.group.rank)

    def enter(self, x: Tensor) -> Tensor:
        """[..., T, D] gathered from members' [..., N, D], for partitioned computation."""
        return self._mapped(x, TokenParts.gathered, TokenParts.summed)

    def leave(self, x: Tensor) -> Tensor:
        """[..., N, D]: this rank's tokens of the sum over members of [..., T, D]."""
        return self._mapped(x, TokenParts.summed, TokenParts.gathered)

    def divide(self, x: Tensor) -> Tensor:
        """This rank's tokens of an x that all members have."""
        return self._mapped(x, TokenParts.own, TokenParts.gathered)

    def join(self, x: Tensor) -> Tensor:
        """All tokens, for computation that is equal on all members."""
        return self._mapped(x, TokenParts.gathered, TokenParts.own)

    def _mapped(self, x: Tensor, there: Move, back: Move) -> Tensor:
        """Map [..., T, D], where all leading dims are 1."""
        counted = TokenParts(self.group, self.num_tokens)  # the backward runs while another layer is current
        moved = mapped(x.reshape(-1, x.shape[-1]), partial(there, counted), partial(back, counted))
        return moved.reshape(*x.shape[:-2], -1, x.shape[-1])

    def own(self, x_TD: Tensor) -> Tensor:
        """[N, D] this rank's tokens, padded."""
        first = min(self.position * self.num_own, self.num_tokens)
        piece = x_TD[first : first + self.num_own]
        return _padded(piece, self.num_own)

    def gathered(self, own_ND: Tensor) -> Tensor:
        """[T, D] all tokens; a collective."""
        whole = own_ND.new_empty(self.group.size * len(own_ND), own_ND.shape[1])
        self.group.gather(whole, own_ND.contiguous()).wait()
        return whole[: self.num_tokens]

    def cut(self, x_TD: Tensor, num_pieces: int) -> list[Tensor]:
        """Pieces with the same range of every member's tokens, ordered by member."""
        whole_MND = _padded(x_TD, self.num_own * self.group.size).unflatten(0, (self.group.size, -1))
        return [piece_MND.flatten(0, 1) for piece_MND in whole_MND.chunk(num_pieces, dim=1)]

    def start_sum(self, y_TD: Tensor) -> tuple[Tensor, Pending]:
        """Start summing a piece: this rank's tokens of it."""
        own_ND = y_TD.new_empty(len(y_TD) // self.group.size, y_TD.shape[1])
        return own_ND, self.group.scatter(own_ND, y_TD.detach().contiguous())

    def start_spread(self, gradient_ND: Tensor) -> tuple[Tensor, Pending]:
        """Start gathering a piece's gradient."""
        whole_TD = gradient_ND.new_empty(self.group.size * len(gradient_ND), gradient_ND.shape[1])
        return whole_TD, self.group.gather(whole_TD, gradient_ND.contiguous())

    def summed(self, x_TD: Tensor) -> Tensor:
        """[N, D] this rank's tokens of the sum over members; a collective."""
        parts = _padded(x_TD, self.num_own * self.group.size)
        own = parts.new_empty(self.num_own, parts.shape[1])
        self.group.scatter(own, parts.contiguous()).wait()
        return own


Talk = TensorGroup | TokenParts  # enters and leaves partitioned computation


def share_tokens(layers: Iterable[nn.Module], first: int, borders: TokenBorders, parts: TokenParts) -> None:
    """Let layers of a stage divide and join tokens at its boundaries; `first`: index of the first layer."""
    for index, layer in enumerate(layers, start=first):
        if index in borders.divided:
            layer.register_forward_pre_hook(_Counted(parts, divides=index in borders.divides))
        if index in borders.joins:
            layer.register_forward_hook(_Joined(parts))


@dataclass(frozen=True, slots=True)
class _Counted:
    """Hook before a layer: records the number of tokens, and selects this rank's where all are given."""

    parts: TokenParts
    divides: bool

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del layer
        hidden, features, context = args
        assert isinstance(context, Context), "as layers are called"
        self.parts.num_tokens = context.data.num_tokens
        return (self.parts.divide(hidden) if self.divides else hidden), features, context


@dataclass(frozen=True, slots=True)
class _Joined:
    """Hook after a layer: joins all tokens."""

    parts: TokenParts

    def __call__(self, layer: nn.Module, args: object, output: Tensor) -> Tensor:
        del layer, args
        return self.parts.join(output)


def _padded(x_TD: Tensor, num_tokens: int) -> Tensor:
    missing = num_tokens - len(x_TD)
    return x_TD if missing == 0 else torch.cat([x_TD, x_TD.new_zeros(missing, x_TD.shape[1])])
