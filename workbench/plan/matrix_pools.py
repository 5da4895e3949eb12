"""Which ranks hold the matrices that Muon updates, whole or in parts, and which of them own a matrix."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from workbench.balance.tokens.policies import longest_first
from workbench.model.experts import EXPERT, is_of_expert
from workbench.model.layer import Layer, Parameter, Shard
from workbench.model.muon import newton_schulz_flop
from workbench.plan.gradient_groups import gradient_groups
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.muon import matrices_of
from workbench.plan.optimizer import Optimizer
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.parameter_shards import sharded_stages
from workbench.plan.plan import Plan, Settings


class HeldMatrix(NamedTuple):
    """A matrix of a layer; or equal ones of all experts on a rank.

    Args:
        shape: of one, whole.
        tp: number of tensor-parallel ranks that cut it; 1: each has it whole.
        num_stacked: number of experts; 1 of others.
    """

    shape: tuple[int, ...]
    tp: int
    num_stacked: int = 1

    @property
    def num_elements(self) -> int:
        """Of whole matrices."""
        return self.num_stacked * prod(self.shape)

    @property
    def held_elements(self) -> float:
        """Of one tensor-parallel rank."""
        return self.num_elements / self.tp

    def each(self) -> "Iterator[HeldMatrix]":
        """Yield them one by one."""
        yield from (self._replace(num_stacked=1),) * self.num_stacked


class MatrixPool(NamedTuple):
    """Weights whose matrices the same ranks hold.

    Args:
        ranks: each holds a part of every matrix, and owns some matrices, which it orthogonalises whole; a
            single rank holds all of them whole.
        weights: in the order of gradient groups.
    """

    ranks: tuple[int, ...]
    weights: tuple[Weights, ...]


def matrix_owners(shapes: Sequence[Sequence[int]], num_ranks: int) -> tuple[int, ...]:
    """Return the index of the rank that owns each matrix of a pool: most FLOP first, see `longest_first`.

    How much a rank owns does not depend on the order of the matrices.

    Complexity: O(matrices x log(ranks)).
    """
    flop = [newton_schulz_flop(tuple(shape)) for shape in shapes]
    return tuple(longest_first(flop, num_ranks).tolist())


@cached_on_instance
def matrix_pools(plan: Plan) -> tuple[MatrixPool, ...]:
    """Return the pools of a plan, none where the optimizer is not Muon. O(gradient groups x their ranks)."""
    pools: dict[tuple[int, ...], dict[Weights, None]] = {}
    for group in gradient_groups(plan) if plan.settings.optimizer is Optimizer.MUON else ():
        (weights,) = group.weights
        if matrices_in(plan, weights):
            for sharers in _sharers(plan, group):
                pools.setdefault(sharers, {})[weights] = None
    return tuple([MatrixPool(ranks, tuple(weights)) for ranks, weights in pools.items()])


@cached_on_instance
def pools_by_rank(plan: Plan) -> dict[int, tuple[MatrixPool, ...]]:
    """Map each rank to the pools of which it holds parts."""
    pools_of: dict[int, list[MatrixPool]] = {}
    for pool in matrix_pools(plan):
        for rank in pool.ranks:
            pools_of.setdefault(rank, []).append(pool)
    return {rank: tuple(pools) for rank, pools in pools_of.items()}


@cached_on_instance
def matrices_in(plan: Plan, weights: Weights) -> tuple[HeldMatrix, ...]:
    """Return the matrices among weights that are reduced together; a tied one is none. O(layer)."""
    if weights.layer is None:
        return ()
    layer = plan.model.module(weights.module).layers[weights.layer]
    held = held_matrices(plan.settings, layer, *_degrees(plan)[weights.module, weights.layer])
    return held.of_experts if weights.experts else held.dense


class HeldMatrices(NamedTuple):
    """Matrices of a layer on one rank; those of distributed experts, which others hold, apart."""

    dense: tuple[HeldMatrix, ...]
    of_experts: tuple[HeldMatrix, ...]


def held_matrices(settings: Settings, layer: Layer, tp: int, ep: int) -> HeldMatrices:
    """Return the matrices of a layer that tp ranks cut, and over ep of which its experts are distributed."""
    matrices = matrices_of(settings, layer)
    ones = tuple([HeldMatrix(each.shape, _cut(each, tp)) for each in matrices if not is_of_expert(each)])
    if ep == 1:
        return HeldMatrices((*ones, *_of_experts(matrices, tp, 1)), ())
    return HeldMatrices(ones, tuple(_of_experts(matrices, 1, ep)))


def _of_experts(matrices: Iterable[Parameter], tp: int, ep: int) -> Iterator[HeldMatrix]:
    """Yield the matrices of a rank's experts by their role in an expert."""
    of_role: dict[str, list[Parameter]] = {}
    for matrix in filter(is_of_expert, matrices):
        role = matrix.name.partition(EXPERT)[2].partition(".")[2]
        of_role.setdefault(role, []).append(matrix)
    for found in of_role.values():
        yield HeldMatrix(found[0].shape, _cut(found[0], tp), len(found) // ep)


def _cut(matrix: Parameter, tp: int) -> int:
    return 1 if matrix.shard is Shard.REPLICATED else tp


@cached_on_instance
def _degrees(plan: Plan) -> dict[tuple[str, int], tuple[int, int]]:
    """Map the layers of each module to tp and ep of their stages, which are equal in all replicas."""
    return {
        (stage.module, layer): (stage.tp, stage.ep) for stage in plan.stages for layer in range(*stage.layers)
    }


def _sharers(plan: Plan, group: GradientGroup) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that hold parts of the same weights, for every rank of a group in the plan."""
    (weights,) = group.weights
    if not plan.settings.of(weights.module).shards_parameters:
        shards = optimizer_shards(plan, group)
        yield from shards.instances
        return
    units = sharded_stages(plan)
    for rank in group.ranks:
        for stage in plan.stages_on.get(rank, ()):  # none where its replica is folded away
            if stage.module == weights.module and stage.layers[0] <= (weights.layer or 0) < stage.layers[1]:
                yield units[stage.id].sharers(rank, experts=weights.experts)


def check_rows(plan: Plan) -> None:
    """Raise ValueError unless tensor-parallel ranks own the parts of the same matrices.

    They gather a matrix from each other, so each is at the same index among the ranks with which it shares
    its parts.

    Complexity: O(pools + ranks of stages).
    """
    index_of = {
        (rank, weights.module, weights.layer): index
        for pool in matrix_pools(plan)
        if len(pool.ranks) > 1
        for index, rank in enumerate(pool.ranks)
        for weights in pool.weights
        if not weights.experts
    }
    for stage in plan.stages if index_of else ():
        for row in stage.ranks:
            for layer in range(*stage.layers):
                indices = [index_of.get((rank, stage.module, layer)) for rank in row]
                if len(set(indices)) > 1:
                    raise ValueError(
                        f"stage {stage.id}: optimizer 'muon' gathers matrices over tp ranks {list(row)}, "
                        f"which hold parts {indices} of layer {layer}; want ranks in the same order in all "
                        "replicas"
                    )
