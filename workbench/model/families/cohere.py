"""Cohere 2 (Command R7B, Command A) and Compass: attention beside the MLP, behind a norm without a shift."""

from collections.abc import Mapping
from typing import Any

from workbench.model.config_fields import Config, attention_bias, whole
from workbench.model.families.decoder import (
    SLIDING,
    default_sizes,
    llama_like,
    scaled_logits,
    unrotated,
    windowed,
)
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.positions import check_axes, check_causal_positions, rope_of
from workbench.model.layer import Attention, Layer
from workbench.model.transformer import Norm, Placement

_SIZES = default_sizes(256000, 8192, 22528, 40, 64, tie_word_embeddings=True)
_FULL_EVERY = 4  # blocks
_FULL = "full_attention"
_SECTION = (24, 20, 20)  # default numbers of pairs that turn with time, row and column


def _cohere2(config: Config) -> Layers:
    """Blocks with a sliding window rotate; the others attend to everything, without positions.

    States are scaled before the head, which gives the scaled logits.
    """
    every = whole(config, "sliding_window_pattern", _FULL_EVERY)
    *blocks, head = windowed(config, _plain(config), slides=lambda block: (block + 1) % every != 0)
    return (*(_positioned(block) for block in blocks), scaled_logits(head))


def _plain(config: Config) -> Layers:
    """Without windows; every block rotates."""
    return llama_like(
        {key: value for key, value in config.items() if key != "head_dim"},  # heads share the width
        defaults=_SIZES,
        heads={"bias": attention_bias(config)},
        mlp={},
        block={"norm": Norm.UNSHIFTED, "placement": Placement.PARALLEL},
    )


def _compass(config: Config) -> Layers:
    """The rotation's parameters say which kinds of blocks rotate; logits are scaled where a number is."""
    embed, *blocks, head = windowed(config, _plain(config), slides=lambda _: False)
    kinds = config.get("layer_types") or [_FULL] * len(blocks)
    ropes = _ropes(config)
    turned = (
        unrotated(block) if ropes.get(kind) is None else block
        for kind, block in zip(kinds, blocks, strict=False)
    )
    has_scale = config.get("logit_scale") is not None
    return (embed, *turned, scaled_logits(head) if has_scale else head)


def _ropes(config: Config) -> Mapping[str, Any]:
    """The parameters of the rotation, or null, of each kind of blocks.

    Raises:
        ValueError: a kind without.
    """
    kinds = dict.fromkeys(config.get("layer_types") or [_FULL])
    stated = rope_of(config)
    if missing := [kind for kind in kinds if kind not in stated]:
        raise ValueError(
            f"{config['model_type']}: rope_parameters must have an object, or null, for each of its "
            f"layer_types, got none for {missing[0]!r}"
        )
    return stated


def _check_compass(config: Config) -> None:
    """Raise ValueError unless axes fill the heads, which have a share of the width each."""
    check_causal_positions(config)
    shared = whole(config, "hidden_size", 8192) // whole(config, "num_attention_heads", 64)
    for rope in _ropes(config).values():
        if isinstance(rope, Mapping):
            check_axes(rope.get("mrope_section", _SECTION), shared // 2, "half a head's width")


def _positioned(layer: Layer) -> Layer:
    """The layer, without a rotation where its attention has no window."""
    attentions = [operator for operator in layer.operators if isinstance(operator, Attention)]
    if all(attention.window is not None for attention in attentions):
        return layer
    return unrotated(layer)


COHERE2 = LanguageModel(
    name="Cohere 2",
    model_type="cohere2",
    check_config=check_causal_positions,
    examples={"cohere 2": Example(config=EXAMPLE_LLM | {"sliding_window": 64, "sliding_window_pattern": 2})},
    make=_cohere2,
)
COHERE_COMPASS = LanguageModel(
    name="Cohere Compass text",
    model_type="cohere_compass_text",
    check_config=_check_compass,
    examples={
        "cohere compass text": Example(
            config=EXAMPLE_LLM
            | {
                "sliding_window": 64,
                "layer_types": [SLIDING, _FULL, SLIDING, _FULL],
                "rope_parameters": {
                    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
                    _FULL: None,
                },
            }
        )
    },
    make=_compass,
)
