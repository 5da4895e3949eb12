"""Matrices that Muon updates in layers of a searched layout: their numbers, and seconds of updates."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.group_link import group_link
from workbench.cost.hardware import Cluster
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.model.layer import Layer
from workbench.plan.matrix_pools import HeldMatrix, held_matrices
from workbench.plan.plan import Settings
from workbench.planner.layout_choice import ModuleChoice
from workbench.schedule.action import Pass
from workbench.timing.muon import OwnerPrices, joined_bytes

Counts = tuple[tuple[HeldMatrix, int], ...]


class Matrices(NamedTuple):
    """Kinds of matrices on a rank, each with its number; none where the optimizer is AdamW.

    Args:
        dense: all but those of distributed experts.
        of_experts: those, whose holders differ.
    """

    dense: Counts = ()
    of_experts: Counts = ()


NO_MATRICES = Matrices()


class _Sharers(NamedTuple):
    """Ranks at a stride that hold parts of the same matrices, of several instances."""

    num_ranks: int
    stride: int
    instances: int


def matrices_on(settings: Settings, layer: Layer, choice: ModuleChoice) -> Matrices:
    """The matrices of a layer on one rank. Complexity: O(layer)."""
    return Matrices._make(_counted(part) for part in held_matrices(settings, layer, choice.tp, choice.ep))


def joined(parts: Iterable[Matrices]) -> Matrices:
    """The matrices of several layers. Complexity: O(kinds of each)."""
    present = [each for each in parts if each != NO_MATRICES]
    if not present:
        return NO_MATRICES
    return Matrices._make(_summed(counts) for counts in zip(*present, strict=True))


def _counted(matrices: Iterable[HeldMatrix]) -> Counts:
    return tuple(Counter(matrices).items())


def _summed(parts: Iterable[Counts]) -> Counts:
    total: Counter[HeldMatrix] = Counter()
    for counts in parts:
        total.update(dict(counts))
    return tuple(total.items())


def shard_elements(choice: ModuleChoice, matrices: Matrices) -> float:
    """Elements of matrices in the part of the optimizer state that a rank has."""
    return float_sum(
        count * matrix.held_elements / sharers.num_ranks
        for counts, sharers in _sharers_of(choice, matrices)
        for matrix, count in counts
    )


def _sharers_of(choice: ModuleChoice, matrices: Matrices) -> tuple[tuple[Counts, _Sharers], ...]:
    instances = choice.instances
    return (
        (matrices.dense, _Sharers(choice.num_holders // instances, choice.tp, instances)),
        (matrices.of_experts, _Sharers(choice.num_expert_holders // instances, choice.ep, instances)),
    )


class MatrixUpdates:
    """Seconds of Muon's updates on a rank, by the plan's prices; what layouts share is computed once.

    Args:
        settings: of the job.
        cluster: its links are those of groups at a stride.
        cost: the machine of every rank.
    """

    def __init__(self, settings: Settings, cluster: Cluster, cost: CostModel) -> None:
        self._settings, self._cluster, self._cost = settings, cluster, cost
        self._owners, self._factor = OwnerPrices(settings), cost.profile.pipeline_factor(Pass.STEP)
        self._pool_s = cache(self._find_pool_s)

    def seconds(self, held: Sequence[tuple[ModuleChoice, Matrices]]) -> float:
        """Seconds of updates, and of their exchanges, on a rank that holds these matrices; 0 for AdamW.

        Modules whose matrices the same number of ranks share at a stride are one pool, as they are in a plan.

        Complexity: O(kinds of matrices), besides new pools: O(matrices x log(ranks)).
        """
        pools: dict[_Sharers, list[Counts]] = {}
        for choice, matrices in held:
            for counts, sharers in _sharers_of(choice, matrices):
                if counts:
                    pools.setdefault(sharers, []).append(counts)
        return float_sum((self._pool_s(_summed(parts), sharers) for sharers, parts in pools.items()), 0.0)

    def _find_pool_s(self, counts: Counts, sharers: _Sharers) -> float:
        num_ranks, stride, instances = sharers
        ones = (matrix for matrix, count in counts for _ in range(count))
        matrices = [
            (each, self._gather_s(each))
            for matrix in ones
            for each in ((matrix,) if num_ranks == 1 else matrix.each())
        ]
        load = self._owners.load(matrices, (self._cost,) * num_ranks)
        seconds = self._factor * load.update_s(num_ranks, self._cost, self._settings) + load.gathers_s
        if num_ranks == 1:
            return seconds
        link = group_link(self._cluster, num_ranks=num_ranks, stride=stride, num_groups=instances)
        num_bytes = load.exchanged_bytes(self._settings)
        return seconds + 2 * self._cost.between_ranks_s(Collective.ALL_TO_ALL, num_bytes, num_ranks, link)

    def _gather_s(self, matrix: HeldMatrix) -> float:
        if matrix.tp == 1:
            return 0.0
        link = group_link(self._cluster, num_ranks=matrix.tp, stride=1)
        num_bytes = joined_bytes(matrix, self._settings)
        return self._cost.between_ranks_s(Collective.ALL_GATHER, num_bytes, matrix.tp, link)
