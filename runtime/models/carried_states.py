"""Hidden states of an encoder that pass beside later ones, up to the projector that reads them all."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Shape suffixes: T = packed tokens, D = width of all that a layer is given: its input, then earlier states,
# the latest first.

Run = Callable[[Tensor, Any], Tensor]


class Beside(ABC):
    """What a layer does with the states beside its input."""

    @abstractmethod
    def around(self, run: Run, x_TD: Tensor, context: Any) -> Tensor:
        """The layer's output, by its own `run`."""


@dataclass(frozen=True, slots=True)
class PassedOn(Beside):
    """A block that passes earlier states on.

    Args:
        width: of a state.
        keeps: whether its own input is one that the projector reads.
    """

    width: int
    keeps: bool

    def around(self, run: Run, x_TD: Tensor, context: Any) -> Tensor:
        y_TD = run(x_TD[:, : self.width].contiguous(), context)
        return torch.cat((y_TD, x_TD if self.keeps else x_TD[:, self.width :]), dim=1)


@dataclass(frozen=True, slots=True)
class InOrder(Beside):
    """A projector that reads its states in their own order.

    Args:
        width: of a state.
        order: place of each among those that it is given.
    """

    width: int
    order: tuple[int, ...]

    def around(self, run: Run, x_TD: Tensor, context: Any) -> Tensor:
        states = x_TD.split(self.width, dim=1)
        return run(torch.cat([states[place] for place in self.order], dim=1), context)


def beside(states: Sequence[int], index: int, width: int) -> Beside | None:
    """What layer `index` does; None: nothing passes beside its input.

    Args:
        states: indices of those that the projector reads, in its order.
        width: of each.
    """
    last = max(states)
    if index > last:
        given = sorted(states, reverse=True)
        return InOrder(width, tuple(map(given.index, states))) if len(states) > 1 else None
    if min(states) >= index:
        return None
    return PassedOn(width, keeps=index - 1 in states)
