"""A layer whose experts are distributed: what the busiest rank computes, and what ranks exchange.

Which experts tokens choose is known only while they run. Assumed here: every token's choices are drawn
at random, alike and independently of other tokens, so each expert gets an equal share in the mean and the
busiest of the ranks somewhat more (`busiest_share`). A trained router is more even than that where a loss
balances it and less where none does.
"""

from dataclasses import replace
from math import comb, sqrt
from statistics import NormalDist
from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.roofline import Grid, Work, operator_tokens
from workbench.model.experts import JOIN, SHARED, expert_index, is_of_expert, num_experts
from workbench.model.layer import Layer, Matmul, Operator, Pointwise, Shard

ROUTER = "mlp.router"
COMBINE = "mlp.combine"  # where results have come back to their tokens
FOR_ALL = "mlp.for_all"  # the expert of all tokens: a block's MLP like any other
COUNT_BYTES = 8


def busiest_share(num_rows: float, num_ranks: int) -> float:
    """What the busiest of the ranks gets, as a multiple of the mean, of rows that fall at random.

    Counts of multinomial draws are nearly normal; the largest of n independent standard ones lies at the
    quantile (n - 3/8) / (n + 1/4) in the mean (Blom 1958, "Statistical Estimates and Transformed
    Beta-Variables"), and since counts add up to all rows each has sqrt(n / rows) of it. At most all rows.

    Args:
        num_rows: of all ranks together; several of one token count as draws of their own.
        num_ranks: among which experts are distributed evenly.
    """
    if num_ranks == 1 or num_rows <= 0:
        return 1.0
    deviations = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return min(float(num_ranks), 1.0 + deviations * sqrt(num_ranks / num_rows))


def on_rank(layer: Layer, work: Work, grid: Grid) -> Layer:
    """The layer as the busiest rank runs it; the layer itself where its experts are not distributed.

    It holds num / ep whole experts, which the tokens of ep ranks choose from; its own tokens, a tp-th of
    those it shares with tensor-parallel ranks, go through the router. The expert of all tokens stays cut.

    Complexity: O(operators).
    """
    count = num_experts(layer) if grid.ep > 1 else 0
    if count == 0:
        return layer
    held = count // grid.ep
    some = next(each for each in layer.operators if is_of_expert(each))
    num_rows = operator_tokens(some, work, grid) * count * grid.ep / grid.tp
    factor = grid.ep * busiest_share(num_rows, grid.ep)
    operators = (
        _on_rank(each, grid, factor)
        for each in layer.operators
        if not is_of_expert(each) or expert_index(each) < held
    )
    return replace(layer, operators=tuple(operators))


def _on_rank(operator: Operator, grid: Grid, factor: float) -> Operator:
    """Pointwise operators share rows as those that tensor parallelism cuts share features: as many bytes."""
    name = operator.name
    if name.startswith(SHARED):
        return replace(operator, name=FOR_ALL + name.removeprefix(SHARED))
    if isinstance(operator, Matmul) and is_of_expert(operator):
        scale = operator.tokens_scale * factor / grid.tp
        return replace(operator, shard=Shard.REPLICATED, tokens_scale=scale)
    if isinstance(operator, Pointwise) and is_of_expert(operator):
        return replace(operator, shard=Shard.COLUMN, tokens_scale=operator.tokens_scale * factor)
    if isinstance(operator, Matmul) and name == ROUTER:
        return replace(operator, tokens_scale=operator.tokens_scale / grid.tp)
    if isinstance(operator, Pointwise) and name.startswith((ROUTER, JOIN)):
        return replace(operator, name=COMBINE if name == JOIN else name, shard=Shard.COLUMN)
    return operator


def copies_share(num_places: int, num_experts: int, num_chosen: int) -> float:
    """Of a copy for each chosen expert, what is left with one for each place that has any of them.

    A place holds an equal share of the experts, so that none of the chosen ones is there with the
    probability of a hypergeometric draw.
    """
    elsewhere = num_experts - num_experts // num_places
    missed = comb(elsewhere, num_chosen) / comb(num_experts, num_chosen)
    return num_places * (1.0 - missed) / num_chosen


class ExpertExchange(NamedTuple):
    """One collective; bytes as `Collective` counts them. Of rows of tokens: among how many experts each
    chooses, and how many; else 0."""

    kind: Collective
    num_bytes: float
    num_ranks: int
    num_experts: int = 0
    num_chosen: int = 0


class ExpertExchanges(NamedTuple):
    """Those of a forward, and (operator in front of which it stands, exchange) of a backward."""

    forward: tuple[ExpertExchange, ...] = ()
    backward: tuple[tuple[int, ExpertExchange], ...] = ()


def _chosen(split: Layer) -> int:
    """Experts of a token: the join reads a row of each, and the token itself."""
    joins = (each for each in split.operators if isinstance(each, Pointwise) and each.name == COMBINE)
    return next(joins).num_passes - 1


def exchanges_of(
    split: Layer, work: Work, grid: Grid, element_bytes: int, *, divided: bool
) -> ExpertExchanges:
    """What ranks exchange around distributed experts.

    Forward: how many rows go where, the rows (tokens x experts of each x width, as many as the busiest
    rank gets), and their results; backward both ways again. Tensor-parallel ranks, each of which sent a
    part of the tokens, gather the results of all, and all gradients.

    Args:
        split: by `on_rank`.
        work: the packed rows.
        grid: degrees.
        element_bytes: of activations.
        divided: whether tensor-parallel ranks divide tokens around the mixture anyway.
    """
    places = {each.name: index for index, each in enumerate(split.operators)}
    first = next((each for each in split.operators if is_of_expert(each)), None)
    if grid.ep == 1 or not isinstance(first, Matmul):
        return ExpertExchanges()
    held = num_experts(split)
    num_bytes = operator_tokens(first, work, grid) * held * first.in_features * element_bytes
    counts = ExpertExchange(Collective.ALL_TO_ALL, held * grid.ep * COUNT_BYTES, grid.ep)
    rows = ExpertExchange(Collective.ALL_TO_ALL, num_bytes, grid.ep, held * grid.ep, _chosen(split))
    forward = [counts, rows, rows]
    backward = [(places[COMBINE], rows), (places[first.name], rows)]
    if grid.tp > 1 and not divided:
        tokens = work.tokens(first.tokens) / grid.cp
        whole = ExpertExchange(Collective.ALL_GATHER, tokens * first.in_features * element_bytes, grid.tp)
        forward.append(whole)
        backward.append((places[ROUTER], whole))
    return ExpertExchanges(tuple(forward), tuple(backward))
