"""Seconds in which ranks update matrices by Muon, as the runtime does: one after the other, each whole."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from workbench.arrays import Floats
from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.cost.roofline import Gemm
from workbench.cost.traffic import WIDE_BYTES
from workbench.model.layer import Parameter
from workbench.model.muon import NEWTON_SCHULZ_STEPS, newton_schulz_products
from workbench.plan.contents import layer_numbers
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.matrix_pools import MatrixPool, matrices_in, matrix_owners, matrix_pools
from workbench.plan.muon import ortho_precision
from workbench.plan.plan import Plan, Settings
from workbench.timing.weights import CollectivePrices

_OF_PARTS = 4  # reads and writes of an element: its owner joins the parts of a matrix, and takes it apart


class MuonSeconds(NamedTuple):
    """Seconds in STEP by index of rank: of updates, and of exchanges between ranks with parts."""

    updates: Floats
    exchanges: Floats


class _Load(NamedTuple):
    """Of a pool's owners: seconds of the slowest, elements of the one with most, and of all.

    The seconds are of products; where one rank has whole matrices, of their updates.
    """

    slowest_s: float
    most_elements: int
    num_elements: int


class MuonPrices:
    """Prices of the matrices that Muon updates; equal ones are priced once per machine.

    Args:
        plan: whose optimizer is Muon.
        cost_of: machine of some ranks.
        collectives: between ranks.
    """

    def __init__(
        self, plan: Plan, cost_of: Callable[[Sequence[int]], CostModel], collectives: CollectivePrices
    ) -> None:
        self._plan, self._cost_of, self._collectives = plan, cost_of, collectives
        self._index_of = {rank: index for index, rank in enumerate(plan.ranks)}
        self._known: dict[tuple[tuple[int, ...], int, bool], float] = {}
        self._loads: dict[tuple[object, ...], _Load] = {}

    def seconds(self, groups: Sequence[GradientGroup], updated: list[float]) -> MuonSeconds:
        """Return the seconds of all updates, and take their elements from each group's `updated`.

        The owner of most work in a pool keeps the other ranks waiting; parts are sent to owners and back.

        Complexity: O(groups + weights of pools + ranks of pools).
        """
        found = MuonSeconds(*np.zeros((2, len(self._index_of))))
        num_parts: dict[Weights, int] = {}
        for pool in matrix_pools(self._plan):
            load, num_ranks = self._load(pool), len(pool.ranks)
            num_parts |= dict.fromkeys(pool.weights, num_ranks)
            most_bytes = load.most_elements * ortho_precision(self._plan.settings).num_bytes
            exchange_s = self._collectives.collective_s(Collective.ALL_TO_ALL, most_bytes, pool.ranks)
            moved = load.num_elements / num_ranks * self._moved_bytes
            for rank in filter(self._index_of.__contains__, pool.ranks):
                update_s = self._cost_of((rank,)).update_s(moved) if num_ranks > 1 else 0.0
                found.updates[self._index_of[rank]] += load.slowest_s + update_s
                found.exchanges[self._index_of[rank]] += 2 * exchange_s
        for number, group in enumerate(groups):
            (weights,) = group.weights
            if weights in num_parts:
                elements = sum(matrix.num_elements for matrix in matrices_in(self._plan, weights))
                updated[number] -= elements / num_parts[weights]
        return found

    def _load(self, pool: MatrixPool) -> "_Load":
        """Return what the owners of a pool have to do; equal for pools of equal layers on equal machines."""
        costs = [self._cost_of((rank,)) for rank in pool.ranks]
        key = tuple([self._kind(weights) for weights in pool.weights]), tuple(map(id, costs))
        if key not in self._loads:
            matrices = [matrix for weights in pool.weights for matrix in matrices_in(self._plan, weights)]
            owners = matrix_owners([matrix.shape for matrix in matrices], len(costs))
            seconds, elements = [0.0] * len(costs), [0] * len(costs)
            for matrix, owner in zip(matrices, owners, strict=True):
                seconds[owner] += self._owner_s(matrix, costs[owner], is_whole=len(costs) == 1)
                elements[owner] += matrix.num_elements
            self._loads[key] = _Load(max(seconds), max(elements), sum(elements))
        return self._loads[key]

    def _owner_s(self, matrix: Parameter, cost: CostModel, *, is_whole: bool) -> float:
        key = matrix.shape, id(cost), is_whole
        if key not in self._known:
            seconds = matrix_s if is_whole else products_s
            self._known[key] = seconds(matrix.shape, self._plan.settings, cost)
        return self._known[key]

    @property
    def _moved_bytes(self) -> int:
        """Bytes that kernels beside the products move per element of parts that a rank updates."""
        return matrix_bytes(self._plan.settings) + _OF_PARTS * ortho_precision(self._plan.settings).num_bytes

    def _kind(self, weights: Weights) -> tuple[str, int]:
        assert weights.layer is not None
        return weights.module, layer_numbers(self._plan, weights.module)[weights.layer]


def products_s(shape: tuple[int, ...], settings: Settings, cost: CostModel) -> float:
    """Return the seconds of the products that orthogonalise a matrix [m, n]. O(1)."""
    precision = ortho_precision(settings)
    gemms = (Gemm(*product) for product in newton_schulz_products(shape))
    return NEWTON_SCHULZ_STEPS * sum(cost.matmul_s(gemm, precision.value)[0] for gemm in gemms)


def matrix_s(shape: tuple[int, ...], settings: Settings, cost: CostModel) -> float:
    """Return the seconds to update one whole matrix [m, n]: its products, then its bytes. O(1)."""
    moved = shape[0] * shape[1] * matrix_bytes(settings)
    return products_s(shape, settings, cost) + cost.update_s(moved)


def matrix_bytes(settings: Settings) -> int:
    """Return the bytes that kernels beside the products move per element of a matrix.

    In the optimizer's type: momentum (2 reads, 1 write), Nesterov's mean (2, 1), decay of the weight (1, 1)
    and its update (1, 1). In that of the products: norm (1 read), division (1, 1), the update's read; a cast
    where the types differ, and a write of narrower weights. PyTorch's kernels, one tensor at a time.
    """
    wide, narrow = settings.optimizer_precision, settings.precision.num_bytes
    element = max(WIDE_BYTES, narrow) if wide is None else wide.num_bytes
    ortho = ortho_precision(settings).num_bytes
    cast = element + ortho if element != ortho else 0
    return 10 * element + 4 * ortho + cast + (narrow if narrow < element else 0)
