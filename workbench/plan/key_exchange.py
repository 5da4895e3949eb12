"""Checks which plans can use ring and all-to-all attention."""

from collections.abc import Iterable

from workbench.masks.patterns import CAUSAL, FULL
from workbench.model.layer import Attention, Layer
from workbench.model.model_graph import TEXT
from workbench.plan.plan import KeyExchange, Plan
from workbench.plan.stage import Stage

RING_MASKS = (CAUSAL, FULL)


def check_key_exchange(plan: Plan) -> None:
    """Raise ValueError for what the papers' ring and all-to-all attention cannot do.

    Raises:
        ValueError: a ring over a sample whose mask is neither causal nor full, or all-to-all over
            more ranks than divide the heads of keys and values.
    """
    kinds = {own.module: own.key_exchange for own in plan.settings.modules}
    if set(kinds.values()) <= {KeyExchange.ALL_GATHER}:
        return
    for stage in plan.stages:
        kind = kinds.get(stage.module, KeyExchange.ALL_GATHER)
        if stage.cp == 1 or kind is KeyExchange.ALL_GATHER:
            continue
        if kind is KeyExchange.RING:
            _check_ring(plan, stage)
        else:
            layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
            where = f"all-to-all attention in stage {stage.id}"
            check_heads(where, stage.module, layers, tp=stage.tp, cp=stage.cp)


def _check_ring(plan: Plan, stage: Stage) -> None:
    if plan.model.module(stage.module).modality != TEXT:
        return  # encoders attend in full
    for sample in plan.batch:
        if sample.mask not in RING_MASKS:
            raise ValueError(
                f"ring attention in stage {stage.id}: masks must be {' or '.join(RING_MASKS)}, sample "
                f"{sample.id} has {sample.mask!r}; want {KeyExchange.ALL_GATHER}"
            )


def check_heads(where: str, module: str, layers: Iterable[Layer], *, tp: int, cp: int) -> None:
    """Raise ValueError where all-to-all attention cannot give each of `cp` ranks whole heads."""
    for layer in layers:
        for operator in layer.operators:
            heads = operator.num_kv_heads // tp if isinstance(operator, Attention) else cp
            if heads % cp:
                fitting = max(degree for degree in range(1, cp + 1) if heads % degree == 0)
                raise ValueError(
                    f"{where}: cp must divide the {heads} key/value heads of {module}.{layer.name}, "
                    f"got cp = {cp}; want {fitting}, or {KeyExchange.ALL_GATHER}"
                )
