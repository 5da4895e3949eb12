"""Which plans can use ring and all-to-all attention."""

from collections.abc import Iterator

from workbench.masks.patterns import CAUSAL, FULL
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT
from workbench.plan.plan import KeyExchange, Plan, Stage

RING_MASKS = (CAUSAL, FULL)


def check_key_exchange(plan: Plan) -> None:
    """Refuse what the papers' ring and all-to-all attention cannot do.

    Raises:
        ValueError: a ring over a sample whose mask is neither causal nor full, or all-to-all over
            more ranks than divide the heads of keys and values.
    """
    for stage in plan.stages:
        kind = plan.settings.of(stage.module).key_exchange
        if stage.cp == 1 or kind is KeyExchange.ALL_GATHER:
            continue
        if kind is KeyExchange.RING:
            _check_ring(plan, stage)
        else:
            _check_heads(plan, stage)


def _check_ring(plan: Plan, stage: Stage) -> None:
    if plan.model.module(stage.module).modality != TEXT:
        return  # encoders attend in full
    for sample in plan.batch:
        if sample.mask not in RING_MASKS:
            raise ValueError(
                f"ring attention in stage {stage.id}: masks must be {' or '.join(RING_MASKS)}, sample "
                f"{sample.id} has {sample.mask!r}; want {KeyExchange.ALL_GATHER}"
            )


def _check_heads(plan: Plan, stage: Stage) -> None:
    for name, operator in _attentions(plan, stage):
        heads = operator.num_kv_heads // stage.tp
        if heads % stage.cp:
            fitting = max(degree for degree in range(1, stage.cp + 1) if heads % degree == 0)
            raise ValueError(
                f"all-to-all attention in stage {stage.id}: cp must divide the {heads} key/value heads of "
                f"{stage.module}.{name}, got cp = {stage.cp}; want {fitting}, or {KeyExchange.ALL_GATHER}"
            )


def _attentions(plan: Plan, stage: Stage) -> Iterator[tuple[str, Attention]]:
    for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
        for operator in layer.operators:
            if isinstance(operator, Attention):
                yield layer.name, operator
