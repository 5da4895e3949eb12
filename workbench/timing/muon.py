"""Seconds in which ranks update matrices by Muon, as the runtime does: one after the other, each whole."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from workbench.arrays import Floats
from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.cost.roofline import Gemm
from workbench.cost.traffic import WIDE_BYTES
from workbench.float_sum import float_sum
from workbench.model.muon import NEWTON_SCHULZ_STEPS, newton_schulz_products
from workbench.plan.contents import layer_numbers
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.matrix_pools import HeldMatrix, MatrixPool, matrices_in, matrix_owners, matrix_pools
from workbench.plan.muon import ortho_precision
from workbench.plan.plan import Plan, Settings
from workbench.timing.weights import CollectivePrices

_OF_PARTS = 4  # reads and writes of an element of a matrix that is joined from parts, and taken apart again


class MuonSeconds(NamedTuple):
    """Seconds in STEP by index of rank: of updates, and of exchanges between ranks with parts."""

    updates: Floats
    exchanges: Floats


class PoolLoad(NamedTuple):
    """What the owners of a pool have to do.

    Args:
        slowest_s, gathers_s: seconds of products of the slowest owner (where one rank has whole matrices, of
            their updates), and of its gathers over tensor-parallel ranks.
        most_elements: of a rank's parts of matrices, those of the owner with most.
        num_elements: those of all owners.
    """

    slowest_s: float
    gathers_s: float
    most_elements: float
    num_elements: float

    def update_s(self, num_ranks: int, cost: CostModel, settings: Settings) -> float:
        """Return the seconds of products, and of a rank's own part of the update."""
        if num_ranks == 1:
            return self.slowest_s
        ortho_bytes = ortho_precision(settings).num_bytes
        moved = self.num_elements / num_ranks * (matrix_bytes(settings) + _OF_PARTS * ortho_bytes)
        return self.slowest_s + cost.update_s(moved)

    def exchanged_bytes(self, settings: Settings) -> float:
        """Return the bytes of parts that ranks send to owners, and of those that owners send back."""
        return self.most_elements * ortho_precision(settings).num_bytes


class OwnerPrices:
    """What owners of matrices have to do; equal matrices are priced once per machine."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[tuple[HeldMatrix, int, bool], float] = {}

    def load(self, matrices: Sequence[tuple[HeldMatrix, float]], costs: Sequence[CostModel]) -> PoolLoad:
        """Return the load of matrices, each with the seconds of its gather over tensor-parallel ranks.

        Args:
            matrices: of several owners one by one.
            costs: machines of the owners.

        Complexity: O(matrices x log(owners)).
        """
        owners = matrix_owners([matrix.shape for matrix, _ in matrices], len(costs))
        seconds, elements = np.zeros((2, len(costs))), np.zeros(len(costs))
        for (matrix, gather_s), owner in zip(matrices, owners, strict=True):
            seconds[0, owner] += self._owner_s(matrix, costs[owner], is_whole=len(costs) == 1)
            seconds[1, owner] += gather_s
            elements[owner] += matrix.held_elements
        products_s, gathers_s = seconds[:, int(np.argmax(seconds.sum(0)))].tolist()
        return PoolLoad(products_s, gathers_s, float(elements.max()), float(elements.sum()))

    def _owner_s(self, matrix: HeldMatrix, cost: CostModel, *, is_whole: bool) -> float:
        key = matrix, id(cost), is_whole
        if key not in self._known:
            settings = self._settings
            seconds = matrix.num_stacked * products_s(matrix.shape, settings, cost)
            if matrix.tp > 1:
                joined = matrix.num_elements * _OF_PARTS * ortho_precision(settings).num_bytes
                seconds += cost.update_s(joined)
            if is_whole:
                seconds += cost.update_s(matrix.held_elements * matrix_bytes(settings))
            self._known[key] = seconds
        return self._known[key]


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
        self._owners = OwnerPrices(plan.settings)
        self._loads: dict[tuple[object, ...], PoolLoad] = {}
        self._row_of = {
            (rank, stage.module): row for stage in plan.stages for row in stage.ranks for rank in row
        }

    def seconds(self, groups: Sequence[GradientGroup], updated: list[float]) -> MuonSeconds:
        """Return the seconds of all updates, and take their elements from each group's `updated`.

        The owner of most work in a pool keeps the other ranks waiting; parts are sent to owners and back.

        Complexity: O(groups + weights of pools + ranks of pools).
        """
        found, settings = MuonSeconds(*np.zeros((2, len(self._index_of)))), self._plan.settings
        num_parts: dict[Weights, int] = {}
        for pool in matrix_pools(self._plan):
            ranks = [rank for rank in pool.ranks if rank in self._index_of]
            if not ranks:
                continue
            load, num_ranks = self._load(pool, ranks[0]), len(pool.ranks)
            num_parts |= dict.fromkeys(pool.weights, num_ranks)
            exchange_s = self._collectives.collective_s(
                Collective.ALL_TO_ALL, load.exchanged_bytes(settings), pool.ranks
            )
            for rank in ranks:
                update_s = load.update_s(num_ranks, self._cost_of((rank,)), settings)
                found.updates[self._index_of[rank]] += update_s
                found.exchanges[self._index_of[rank]] += load.gathers_s + 2 * exchange_s
        for number, group in enumerate(groups):
            (weights,) = group.weights
            if weights in num_parts:
                elements = float_sum(matrix.held_elements for matrix in matrices_in(self._plan, weights))
                updated[number] -= elements / num_parts[weights]
        return found

    def _load(self, pool: MatrixPool, rank: int) -> PoolLoad:
        """Return the load of a pool, seen by a rank; equal for equal layers on equal machines and links."""
        costs = tuple([self._cost_of((owner,)) for owner in pool.ranks])
        rows = {weights.module: self._row_of[rank, weights.module] for weights in pool.weights}
        links = tuple([self._collectives.link(row) for row in rows.values() if len(row) > 1])
        key = tuple([self._kind(weights) for weights in pool.weights]), tuple(map(id, costs)), links
        if key not in self._loads:
            matrices = [
                (each, self._gather_s(each, rows[weights.module]))
                for weights in pool.weights
                for matrix in matrices_in(self._plan, weights)
                for each in ((matrix,) if len(costs) == 1 else matrix.each())
            ]
            self._loads[key] = self._owners.load(matrices, costs)
        return self._loads[key]

    def _gather_s(self, matrix: HeldMatrix, row: Sequence[int]) -> float:
        """Return the seconds in which tensor-parallel ranks gather a matrix that they cut."""
        if matrix.tp == 1:
            return 0.0
        return self._collectives.collective_s(
            Collective.ALL_GATHER, joined_bytes(matrix, self._plan.settings), row
        )

    def _kind(self, weights: Weights) -> tuple[str, int]:
        assert weights.layer is not None
        return weights.module, layer_numbers(self._plan, weights.module)[weights.layer]


def joined_bytes(matrix: HeldMatrix, settings: Settings) -> float:
    """Return the bytes of a matrix that tensor-parallel ranks gather: whole, in the type of its products."""
    return matrix.num_elements * ortho_precision(settings).num_bytes


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
