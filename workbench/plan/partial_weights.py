"""Weights that each tensor-parallel rank holds whole, with a part of the gradient: ranks add the parts up.

Those of layers that split tokens, whose ranks see other tokens; and those inside partitioned computation:
routers, norms of single heads, projections to latents, biases that one rank adds, uncut halves of adapters.
"""

from workbench.model.experts import (
    EXPERTS_NORM,
    LATENT_UP,
    ROUTER,
    SHARED,
    SHARED_GATE,
    is_of_expert,
)
from workbench.model.latent_attention import LATENT_NORMS
from workbench.model.layer import Layer, Matmul, Operator, Parameter, Pointwise, Shard
from workbench.model.trained import is_trained, trainable_in
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Plan
from workbench.plan.sequence import can_divide, token_borders
from workbench.plan.stage import Stage

_PARTS: LruCache[tuple[Parameter, ...]] = LruCache(16_384)


def partial_weights(plan: Plan, stage: Stage) -> dict[int, tuple[Parameter, ...]]:
    """Return the trained weights with partial gradients of each layer of a stage that has any.

    Complexity: O(layers of the stage), and once for each layer O(operators).
    """
    if stage.tp == 1:
        return {}
    divided, layers = frozenset(token_borders(plan, stage).divided), plan.model.module(stage.module).layers
    parts = (
        (index, _parts_of(layers[index], splits_tokens=index in divided, distributes=stage.ep > 1))
        for index in range(*stage.layers)
    )
    return {index: own for index, own in parts if own}


def may_have_partial_weights(plan: Plan, module: str) -> bool:
    """Whether any layer of the module may have some; all of its replicas have the same tensor parallelism.

    Complexity: O(stages + layers).
    """
    if next(stage for stage in plan.stages if stage.module == module).tp == 1:
        return False
    layers = plan.model.module(module).layers
    return plan.settings.divides_tokens(module) or any(
        _parts_of(layer, splits_tokens=False, distributes=False) for layer in layers
    )


def _parts_of(layer: Layer, *, splits_tokens: bool, distributes: bool) -> tuple[Parameter, ...]:
    """Return those of a layer; `distributes`: whether ranks hold different experts, each whole."""
    if not is_trained(layer):
        return ()
    key = Identity(layer), splits_tokens, distributes
    return _PARTS.get_or(key, lambda: _derived(layer, splits_tokens=splits_tokens, distributes=distributes))


def _derived(layer: Layer, *, splits_tokens: bool, distributes: bool) -> tuple[Parameter, ...]:
    every = layer.has_adapters or (splits_tokens and can_divide(layer))
    return tuple(
        parameter
        for operator in layer.operators
        if (every or _is_inside(operator, layer)) and not (distributes and is_of_expert(operator))
        for parameter in trainable_in(layer, operator)
        if parameter.shard is Shard.REPLICATED
    )


def _is_inside(operator: Operator, layer: Layer) -> bool:
    """Whether whole weights of an operator work between the entry of a partition and the sum behind it."""
    name = operator.name
    if isinstance(operator, Matmul):
        if operator.shard is Shard.ROW:  # its bias: results of experts are summed once, one rank's with it
            return is_of_expert(operator) or name.startswith(f"{SHARED}.")
        return operator.enters or name in (ROUTER, SHARED_GATE, LATENT_UP)
    if isinstance(operator, Pointwise):
        is_router = name.startswith(ROUTER) or name == EXPERTS_NORM
        return operator.shard is Shard.COLUMN or is_router or (name in LATENT_NORMS and _enters(layer))
    return False


def _enters(layer: Layer) -> bool:
    """Whether ranks enter a partition before projections to latents, not behind them."""
    return any(isinstance(operator, Matmul) and operator.enters for operator in layer.operators)
