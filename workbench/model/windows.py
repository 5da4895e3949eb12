"""What some language models do to queries, keys and scores beside their weights: windows, caps, norms."""

from collections.abc import Mapping
from dataclasses import replace

from workbench.model.config_fields import Config, whole
from workbench.model.layer import Attention, Layer, LayerKind, Pointwise, Shard

# As transformers' configurations have them: how far a query sees back where nothing is said, and by
# how much scores and logits are bent.
WINDOWS: Mapping[str, int | None] = {"mixtral": None, "phi3": None}
WINDOW = 4096
CAPS: Mapping[str, tuple[float | None, float | None]] = {
    "gemma2": (50.0, 30.0),
    "gemma3_text": (None, None),
}
NO_ROTATION_EVERY = 4  # blocks of Llama 4
SLIDING = "sliding_attention"


def windowed(config: Config, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers with the window of each attention that has one; ValueError for a window below 1."""
    kind = config["model_type"]
    if config.get("sliding_window", WINDOWS.get(kind, WINDOW)) is None:
        return layers
    window = whole(config, "sliding_window", WINDOW)
    blocks = [index for index, layer in enumerate(layers) if layer.kind is LayerKind.BLOCK]
    slides = {index for place, index in enumerate(blocks) if _slides(config, place)}
    return tuple(_attending(layer, window=window) if i in slides else layer for i, layer in enumerate(layers))


def _slides(config: Config, block: int) -> bool:
    """Whether a query of that block sees no further than the window."""
    listed = config.get("layer_types")
    if listed is not None:
        return bool(block < len(listed) and listed[block] == SLIDING)
    match config["model_type"]:
        case "gemma2":
            return block % 2 == 0
        case "gemma3_text":
            return (block + 1) % whole(config, "sliding_window_pattern", 6) != 0
        case "qwen2" | "qwen3":
            return bool(config.get("use_sliding_window")) and block >= int(
                config.get("max_window_layers", 28)
            )
    return True


def capped(config: Config, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers with scores and logits bent to a greatest value, where the configuration says so."""
    scores, logits = CAPS[config["model_type"]]
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


def normed(config: Config, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Llama 4's blocks with a norm of queries and keys that has no weights, where these are rotated."""
    if not config.get("use_qk_norm", True):
        return layers
    rotates = config.get("no_rope_layers") or ()
    found, block = [], 0
    for layer in layers:
        if layer.kind is not LayerKind.BLOCK:
            found.append(layer)
            continue
        is_rotated = rotates[block] if block < len(rotates) else (block + 1) % NO_ROTATION_EVERY
        found.append(_with_norm(layer) if is_rotated else layer)
        block += 1
    return tuple(found)


def _with_norm(layer: Layer) -> Layer:
    place = next(i for i, each in enumerate(layer.operators) if isinstance(each, Attention))
    attention = layer.operators[place]
    assert isinstance(attention, Attention)
    width = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    norm = Pointwise(name="qk_norm", width=width, num_passes=2, shard=Shard.COLUMN)
    return replace(layer, operators=(*layer.operators[:place], norm, *layer.operators[place:]))
