"""Overlap of a product and the sum of its results over tensor-parallel ranks, in pieces.

Forward, the sum of a piece overlaps the product of the next one. Backward, where ranks split tokens, gathers
of all pieces' gradients start together, and a piece's product overlaps later gathers.

Source: Z. Zhang et al., "DistTrain", appendix A.1 (StepCCL).
Differs: collectives in front of products, whose tensor other operators of a region may read, are not split.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.parallel.context.group import Pending
from runtime.parallel.tensor.sequence import Talk

# Shape suffixes: T = input tokens of the product, N = a member's tokens of the sum, D = width.

Flight = tuple[Tensor, Pending | None]  # buffer of a collective, and its pending end; None: complete


def summed_in_pieces(product: Callable[[Tensor], Tensor], x: Tensor, talk: Talk, num_pieces: int) -> Tensor:
    """This member's part of the sum of `product(x)` over members."""
    pieces = talk.cut(x.reshape(-1, x.shape[-1]), num_pieces)
    flights = [_Flights() for _ in pieces]
    started = [
        _Start.apply(product(piece), flight, talk) for piece, flight in zip(pieces, flights, strict=True)
    ]
    total: Tensor = _Finish.apply(flights, talk, *started)
    return total.reshape(*x.shape[:-2], -1, total.shape[-1])


class _Flights:
    """Collectives of one piece in flight."""

    def __init__(self) -> None:
        self.forward: Flight | None = None
        self.backward: Flight | None = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, flights: _Flights, talk: Talk) -> Tensor:
        ctx.flights = flights
        flights.forward = talk.start_sum(y_TD)
        return flights.forward[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        del gradient  # the same that `_Finish` got; its gathered form is in flight
        spread_TD, pending = ctx.flights.backward
        if pending is not None:
            pending.wait()
        return spread_TD, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flights: Sequence[_Flights], talk: Talk, *pieces_ND: Tensor) -> Tensor:
        ctx.flights, ctx.talk, ctx.sizes = flights, talk, [len(piece) for piece in pieces_ND]
        for flight in flights:
            assert flight.forward is not None
            pending = flight.forward[1]
            if pending is not None:
                pending.wait()
            flight.forward = None
        return torch.cat(pieces_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradient_ND.split(ctx.sizes)
        # autograd visits the last piece first
        for flight, part in reversed(list(zip(ctx.flights, parts, strict=True))):
            flight.backward = ctx.talk.start_spread(part)
        return (None, None, *parts)
