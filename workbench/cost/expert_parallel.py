"""Expert parallelism in a layer: the work of the busiest rank, and what ranks exchange.

The experts that tokens choose are known only at run time. Here every token's choices are assumed to be
random, identically distributed and independent, so that the busiest rank gets somewhat more than the mean
(`busiest_share`). Experts have equal shares in the long run unless the layer says how unequal they are
(`workbench.model.expert_load`). A trained router is more even where a loss balances it, and less without one.
"""

from dataclasses import replace
from math import comb, lcm
from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.expert_load import busiest_share
from workbench.cost.roofline import Grid, Work, operator_tokens
from workbench.model.expert_load import load_cv
from workbench.model.experts import (
    JOIN,
    LATENT_DOWN,
    LATENT_UP,
    ROUTER,
    SHARED,
    SHARED_GATE,
    SHARED_GATED,
    expert_index,
    is_of_expert,
    num_experts,
)
from workbench.model.layer import Layer, Matmul, Operator, Pointwise, Shard

COMBINE = "mlp.combine"  # where results are back at their tokens
FOR_ALL = "mlp.for_all"  # the shared expert: an ordinary MLP
FOR_ALL_GATE, FOR_ALL_GATED = (FOR_ALL + name.removeprefix(SHARED) for name in (SHARED_GATE, SHARED_GATED))
COUNT_BYTES = 8


def on_rank(layer: Layer, work: Work, grid: Grid) -> Layer:
    """The layer as the busiest rank runs it; the layer itself where its experts are not distributed.

    The rank holds num / ep whole experts, which tokens of ep ranks choose from; its own tokens, a tp-th of
    those it shares with tensor-parallel ranks, go through the router. The shared expert stays cut by tp.
    Where the ranks have unequally many tokens, experts get those of all of them (`Work.experts_load`).

    Complexity: O(operators).
    """
    count = num_experts(layer) if grid.ep > 1 else 0
    if count == 0:
        return layer
    num_held = count // grid.ep
    expert_operator = next(operator for operator in layer.operators if is_of_expert(operator))
    num_rows = operator_tokens(expert_operator, work, grid) * count * grid.ep / grid.tp * work.experts_load
    share = busiest_share(num_rows, grid.ep, num_experts=count, load_cv=load_cv(layer))
    factor = grid.ep * share * work.experts_load
    operators = (
        _on_rank(operator, grid, factor)
        for operator in layer.operators
        if not is_of_expert(operator) or expert_index(operator) < num_held
    )
    return replace(layer, operators=tuple(operators))


def _on_rank(operator: Operator, grid: Grid, factor: float) -> Operator:
    """The operator with the rank's rows; pointwise ones become column-cut, which moves as many bytes."""
    name = operator.name
    if name.startswith(SHARED):
        return replace(operator, name=FOR_ALL + name.removeprefix(SHARED))
    if isinstance(operator, Matmul) and is_of_expert(operator):
        scale = operator.tokens_scale * factor / grid.tp
        return replace(operator, shard=Shard.REPLICATED, tokens_scale=scale)
    if isinstance(operator, Pointwise) and is_of_expert(operator):
        return replace(operator, shard=Shard.COLUMN, tokens_scale=operator.tokens_scale * factor)
    if isinstance(operator, Matmul) and name in (ROUTER, LATENT_DOWN, LATENT_UP):
        return replace(operator, tokens_scale=operator.tokens_scale / grid.tp, enters=False)
    if isinstance(operator, Pointwise) and name.startswith((ROUTER, JOIN)):
        return replace(operator, name=COMBINE if name == JOIN else name, shard=Shard.COLUMN)
    return operator


def copies_share(num_places: int, num_experts: int, num_chosen: int) -> float:
    """Copies with one per place that holds any chosen expert, over copies with one per chosen expert.

    Places (nodes or ranks) hold equal shares of the experts; the probability that none of the chosen ones
    is at a place is hypergeometric.
    """
    elsewhere = num_experts - num_experts // num_places
    missed = comb(elsewhere, num_chosen) / comb(num_experts, num_chosen)
    return num_places * (1.0 - missed) / num_chosen


def in_turn_share(num_places: int, num_experts: int, num_chosen: int) -> float:
    """The same where token after token takes the next `num_chosen` experts, from the first after the last."""
    per_place = num_experts // num_places
    starts = range(0, lcm(num_experts, num_chosen), num_chosen)
    places = [
        len({(start + offset) % num_experts // per_place for offset in range(num_chosen)}) for start in starts
    ]
    return sum(places) / len(places) / num_chosen


class ExpertExchange(NamedTuple):
    """One collective; bytes as `Collective` counts them.

    For exchanges of token rows, the number of experts and of chosen experts a token; else 0.
    """

    kind: Collective
    num_bytes: float
    num_ranks: int
    num_experts: int = 0
    num_chosen: int = 0


class ExpertExchanges(NamedTuple):
    """Exchanges of a forward, and pairs (index of the operator that it precedes, exchange) of a backward."""

    forward: tuple[ExpertExchange, ...] = ()
    backward: tuple[tuple[int, ExpertExchange], ...] = ()


def _chosen(split: Layer) -> int:
    """Experts that a token chooses: the join reads one row of each, and the token itself."""
    joins = (each for each in split.operators if isinstance(each, Pointwise) and each.name == COMBINE)
    return next(joins).num_passes - 1


def exchanges_of(
    split: Layer, work: Work, grid: Grid, element_bytes: int, *, divided: bool
) -> ExpertExchanges:
    """The collectives around distributed experts.

    Forward: the counts of rows, the rows (tokens x experts of each x width, as many as the busiest rank
    gets, or as a rank with more tokens than the mean sends), and their results; backward both ways again.
    Tensor-parallel ranks, which each sent a part of the tokens, gather all results and all gradients.

    Args:
        split: the layer by `on_rank`.
        work: the packed rows.
        grid: degrees of parallelism.
        element_bytes: bytes of an activation element.
        divided: whether tensor-parallel ranks already divide tokens around the mixture.
    """
    index_of = {operator.name: index for index, operator in enumerate(split.operators)}
    first = next((operator for operator in split.operators if is_of_expert(operator)), None)
    if grid.ep == 1 or not isinstance(first, Matmul):
        return ExpertExchanges()
    num_held = num_experts(split)
    received = operator_tokens(first, work, grid) * num_held * first.in_features * element_bytes
    num_bytes = received / min(1.0, work.experts_load)
    counts = ExpertExchange(Collective.ALL_TO_ALL, num_held * grid.ep * COUNT_BYTES, grid.ep)
    rows = ExpertExchange(Collective.ALL_TO_ALL, num_bytes, grid.ep, num_held * grid.ep, _chosen(split))
    forward = [counts, rows, rows]
    backward = [(index_of[COMBINE], rows), (index_of[first.name], rows)]
    if grid.tp > 1 and not divided:
        router = split.operators[index_of[ROUTER]]
        assert isinstance(router, Matmul), "the operator of that name"
        tokens = work.tokens(first.tokens) / grid.cp
        whole = ExpertExchange(Collective.ALL_GATHER, tokens * router.in_features * element_bytes, grid.tp)
        forward.append(whole)
        backward.append((index_of[ROUTER], whole))
    return ExpertExchanges(tuple(forward), tuple(backward))
