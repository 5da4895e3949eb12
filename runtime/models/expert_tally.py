"""Counts on the device how unequally a router loads its experts; read when a step has ended."""

from typing import NamedTuple

from torch import Tensor

from workbench.model.expert_load import square_of_chance


class CountedLoad(NamedTuple):
    """Loads of a module's experts in one step, by the tokens of one rank.

    Args:
        module: its name.
        excess: squared CV of the counted rows of experts, less that of random choices; of all forwards.
        num_forwards: of layers with experts, recomputed ones among them.
    """

    module: str
    excess: float
    num_forwards: int


class ExpertTally:
    """Adds up how far counted loads exceed those of random choices, over forwards."""

    __slots__ = ("_excess", "_num_forwards")

    def __init__(self) -> None:
        self._excess: Tensor | float = 0.0
        self._num_forwards = 0

    def add(self, expert_SK: Tensor, num_experts: int) -> None:
        """Count the choices of one forward; waits for nothing.

        Complexity: O(S K + num_experts), with working memory of the latter.
        """
        num_rows = expert_SK.numel()
        if num_rows == 0:
            return
        index_R = expert_SK.detach().reshape(-1)
        one_R = index_R.new_ones(1).expand(num_rows)
        rows_X = index_R.new_zeros(num_experts).scatter_add_(0, index_R, one_R)
        expected = 1 + square_of_chance(num_experts, num_rows)
        self._excess = rows_X.square().sum() * (num_experts / num_rows**2) - expected + self._excess
        self._num_forwards += 1

    def take(self, module: str) -> CountedLoad:
        """Return what was counted since the last time; waits for the device."""
        load = CountedLoad(module, float(self._excess), self._num_forwards)
        self._excess, self._num_forwards = 0.0, 0
        return load
