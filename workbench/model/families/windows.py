"""What some language models do to scores beside their weights: windows and caps."""

from collections.abc import Callable
from dataclasses import replace

from workbench.model.config_fields import Config, whole
from workbench.model.families.family import Layers
from workbench.model.layer import Attention, Layer, LayerKind, Pointwise

WINDOW = 4096  # how far a query sees back where a configuration says nothing
SLIDING = "sliding_attention"


def windowed(
    config: Config,
    layers: Layers,
    *,
    slides: Callable[[int], bool] = lambda _: True,
    default: int | None = WINDOW,
) -> Layers:
    """The layers with the window of each attention that has one.

    Args:
        slides: whether a query of that block sees no further than the window, where the configuration
            lists no kinds of layers.
        default: the window where the configuration says nothing; None: there is none.

    Raises:
        ValueError: a window below 1.
    """
    if config.get("sliding_window", default) is None:
        return layers
    window = whole(config, "sliding_window", WINDOW)
    listed = config.get("layer_types")
    blocks = [index for index, layer in enumerate(layers) if layer.kind is LayerKind.BLOCK]
    if listed is None:
        within = {index for place, index in enumerate(blocks) if slides(place)}
    else:
        within = {index for index, kind in zip(blocks, listed, strict=False) if kind == SLIDING}
    return tuple(_attending(layer, window=window) if i in within else layer for i, layer in enumerate(layers))


def capped(
    config: Config, layers: Layers, *, scores: float | None = None, logits: float | None = None
) -> Layers:
    """The layers with scores and logits bent to a greatest value, where the configuration says so.

    Args:
        scores, logits: the value where the configuration says nothing; None: they are not bent.
    """
    if scores is not None and config.get("attn_logit_softcapping", scores) is not None:
        layers = tuple(_attending(layer, is_capped=True) for layer in layers)
    if config.get("final_logit_softcapping", logits) is None:
        return layers
    *others, head = layers
    *operators, loss = head.operators
    assert isinstance(loss, Pointwise), "a head ends with its loss"
    return (*others, replace(head, operators=(*operators, replace(loss, is_capped=True))))


def _attending(layer: Layer, **changes: object) -> Layer:
    operators = (
        replace(each, **changes) if isinstance(each, Attention) else each  # type: ignore[arg-type]
        for each in layer.operators
    )
    return replace(layer, operators=tuple(operators))
